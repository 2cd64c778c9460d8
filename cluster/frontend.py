"""From the body of a request to a generation: prompts to token ids, checks, one seed per choice."""

import time
from dataclasses import dataclass

from cluster.answers import UsageCount
from cluster.api_errors import InvalidRequestError, NotFoundError, UnavailableError
from cluster.chat_template import ChatTemplateError
from cluster.choice import Choice, StopRules
from cluster.engine_client import EngineClient
from cluster.generation import UNAVAILABLE_RETRY_SECONDS, Generation
from cluster.openai_api import (
    MAX_PROMPT_BYTES,
    MAX_SEQUENCES,
    ApiRequest,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
)
from cluster.sampling import (
    ModelLimits,
    SamplingDefaults,
    SeedSource,
    check_supported,
    check_token_ids,
    sampling_params,
    seed_of_choice,
    with_seed,
)
from cluster.text import TextCodec
from scheduler.messages import SubmitRequest, pack_token_ids


@dataclass(frozen=True, slots=True)
class Frontend:
    """What one replica answers requests with."""

    engine: EngineClient
    codec: TextCodec
    defaults: SamplingDefaults
    seeds: SeedSource
    model_names: tuple[str, ...]
    """The first one appears in answers."""
    max_queue_seconds: float

    def limits(self) -> ModelLimits:
        """Raises UnavailableError until the workers have reported."""
        info = self.engine.info()
        if not info.takes_requests:
            raise UnavailableError(
                info.reason or f"The engine is {info.state}.",
                retry_after_seconds=UNAVAILABLE_RETRY_SECONDS,
            )
        return ModelLimits(vocab_size=info.vocab_size, max_model_len=info.max_model_len)

    def check_model(self, name: str | None) -> str:
        """The name of the model in the answer; raises NotFoundError for one that is not served."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist.", param="model", code="model_not_found"
            )
        return name

    async def prepare(self, request: ApiRequest, answer_id: str) -> tuple[Generation, UsageCount]:
        """A generation that is not started yet. Raises ApiError for what cannot be served."""
        arrived_seconds = time.monotonic()
        check_supported(request)
        limits = self.limits()
        num_choices = request.n or 1
        prompts = await self._prompts(request, num_choices, limits)
        rules = StopRules(
            texts=tuple(request.stops),
            token_ids=frozenset(request.stop_token_ids or ()),
            include_in_output=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
        )
        messages: list[SubmitRequest] = []
        choices: list[Choice] = []
        arrival_seconds = time.time()
        for prompt in prompts:
            seed = self.seeds.draw() if request.seed is None else request.seed
            params = sampling_params(
                request,
                defaults=self.defaults,
                limits=limits,
                num_prompt_tokens=len(prompt),
                seed=seed,
            )
            packed = pack_token_ids(prompt)
            for choice in range(num_choices):
                index = len(choices)
                message = SubmitRequest(
                    request_id=f"{answer_id}/{index}",
                    client_id=self.engine.client_id,
                    prompt_token_ids=packed,
                    sampling=with_seed(params, seed_of_choice(seed, choice)),
                    arrival_seconds=arrival_seconds,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                )
                detokenizer = self.codec.detokenizer(
                    prompt, skip_special_tokens=request.skip_special_tokens is not False
                )
                messages.append(message)
                choices.append(Choice(index, message.request_id, detokenizer, rules))
        generation = Generation(
            self.engine,
            messages,
            choices,
            max_queue_seconds=self.max_queue_seconds,
            arrived_seconds=arrived_seconds,
            num_choices_per_prompt=num_choices,
        )
        return generation, UsageCount(generation.num_prompt_tokens, num_choices)

    async def _prompts(
        self, request: ApiRequest, num_choices: int, limits: ModelLimits
    ) -> list[list[int]]:
        if isinstance(request, ChatCompletionRequest):
            return [await self._chat_prompt(request)]
        texts, id_lists = _prompt_parts(request)
        num_sequences = (len(texts) + len(id_lists)) * num_choices
        if num_sequences > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"{len(texts) + len(id_lists)} prompts with n of {num_choices} make"
                f" {num_sequences} sequences; one request may have {MAX_SEQUENCES}.",
                param="prompt",
            )
        for token_ids in id_lists:
            check_token_ids(token_ids, limits.vocab_size, "prompt")
        if texts:
            _check_size(texts, "prompt")
            id_lists = await self.codec.encode(texts)
        if not all(id_lists):
            raise InvalidRequestError(
                "The prompt is empty; it needs at least 1 token.", param="prompt"
            )
        return id_lists

    async def _chat_prompt(self, request: ChatCompletionRequest) -> list[int]:
        texts = [_text_of(message, place) for place, message in enumerate(request.messages)]
        _check_size([text for text in texts if text is not None], "messages")
        messages = [
            message.model_dump(exclude_unset=True) | {"content": text}
            for message, text in zip(request.messages, texts, strict=True)
        ]
        try:
            return await self.codec.encode_chat(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=request.chat_template_kwargs,
            )
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error), param="messages") from error


def _prompt_parts(request: CompletionRequest) -> tuple[list[str], list[list[int]]]:
    """The prompts as texts or as token ids; one of the two is empty."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt], []
    if isinstance(prompt[0], str):
        return prompt, []
    if isinstance(prompt[0], int):
        return [], [prompt]
    return [], prompt


def _text_of(message: ChatMessage, place: int) -> str | None:
    """The text of a message in one piece, which is what chat templates expect. Only a message of
    the model's own may have none."""
    param = f"messages.{place}.content"
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(f"{param} is missing.", param=param)
    if not isinstance(message.content, list):
        return message.content
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                "This model reads text only: content parts must have the type text.",
                param=param,
            )
        texts.append(part.text)
    return "\n".join(texts)


def _check_size(texts: list[str], param: str) -> None:
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_PROMPT_BYTES:
        raise InvalidRequestError(
            f"{param} hold {num_bytes} bytes of text; at most {MAX_PROMPT_BYTES} are read.",
            param=param,
        )
