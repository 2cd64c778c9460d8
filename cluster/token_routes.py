"""Text to token ids and back, as the model sees it."""

import msgspec
from fastapi import APIRouter, Response

from cluster.api_errors import InvalidRequestError
from cluster.frontend import Frontend, check_size
from cluster.openai_api import DetokenizeRequest, TokenizeRequest
from cluster.sampling import check_token_ids


def token_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["tokens"])
    codec = frontend.codec

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        frontend.check_model(body.model)
        token_ids = await _token_ids(frontend, body)
        answer = {
            "count": len(token_ids),
            "max_model_len": frontend.engine.info().max_model_len or None,
            "tokens": token_ids,
            "token_strs": await codec.pieces(token_ids) if body.return_token_strs else None,
        }
        # There may be a million of them, and FastAPI would look at each.
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids, special tokens included."""
        frontend.check_model(body.model)
        vocab_size = max(codec.vocab_size, frontend.engine.info().vocab_size)
        check_token_ids(body.tokens, vocab_size, "tokens")
        return {"prompt": await codec.decode(body.tokens)}

    return router


async def _token_ids(frontend: Frontend, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        return await frontend.encode_chat(body.messages, body)
    texts = [body.prompt or ""]
    check_size(texts, "prompt")
    add_special_tokens = body.add_special_tokens is not False
    [token_ids] = await frontend.codec.encode(texts, add_special_tokens=add_special_tokens)
    return token_ids
