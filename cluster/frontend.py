"""From the body of a request to a generation: prompts to token ids, checks, one seed per choice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.api_errors import InvalidRequestError, NotFoundError, UnavailableError
from cluster.chat_template import ChatTemplateError, Conversation
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
    TemplateFields,
)
from cluster.prompt import Prompt
from cluster.sampling import (
    ModelLimits,
    SamplingDefaults,
    SeedSource,
    TokenSequences,
    bad_word_spellings,
    check_supported,
    check_token_ids,
    room_for_prompt,
    sampling_params,
    seed_of_choice,
)
from cluster.text import TextCodec
from cluster.usage import UsageCount
from scheduler.messages import SamplingParams, SubmitRequest, pack_token_ids


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be started."""

    generation: Generation
    usage: UsageCount
    prompts: list[Prompt]
    """Per choice."""


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

    def _limits(self) -> ModelLimits:
        """Raises UnavailableError until the workers have reported."""
        info = self.engine.info()
        if not info.takes_requests:
            self.engine.metrics.counts.refused("unavailable")
            raise UnavailableError(
                info.reason or f"The engine is {info.state}.",
                retry_after_seconds=UNAVAILABLE_RETRY_SECONDS,
            )
        return ModelLimits(vocab_size=info.vocab_size, max_model_len=info.max_model_len)

    def check_model(self, name: str | None) -> str:
        """The name of the model in the answer; raises NotFoundError for one that is not served."""
        if name is not None and name not in self.model_names:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist.", param="model", code="model_not_found"
            )
        return self.model_names[0]

    async def prepare(
        self, request: ApiRequest, answer_id: str, *, client_request_id: str = ""
    ) -> Prepared:
        """A generation that is not started yet. Raises ApiError for what cannot be served.

        `client_request_id` is the other id under which the request can be aborted.
        """
        arrived_seconds = time.monotonic()
        check_supported(request)
        limits = self._limits()
        num_choices = request.n or 1
        prompts = await self._prompts(request, num_choices, limits)
        bad_words = await self._bad_words(request)
        messages: list[SubmitRequest] = []
        choices: list[Choice] = []
        arrival_seconds = time.time()
        for prompt in prompts:
            seed = self.seeds.draw() if request.seed is None else request.seed
            params = sampling_params(
                request,
                defaults=self.defaults,
                limits=limits,
                num_prompt_tokens=len(prompt.token_ids),
                seed=seed,
                bad_words=bad_words,
            )
            packed = pack_token_ids(prompt.token_ids)
            for choice in range(num_choices):
                index = len(choices)
                message = SubmitRequest(
                    request_id=f"{answer_id}/{index}",
                    client_id=self.engine.client_id,
                    prompt_token_ids=packed,
                    sampling=_of_choice(params, request, seed, choice),
                    arrival_seconds=arrival_seconds,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                    client_request_id=client_request_id,
                )
                messages.append(message)
                choices.append(self._choice(request, prompt, index, message.request_id))
        generation = Generation(
            self.engine,
            messages,
            choices,
            max_queue_seconds=self.max_queue_seconds,
            arrived_seconds=arrived_seconds,
            num_choices_per_prompt=num_choices,
        )
        usage = UsageCount(generation.num_prompt_tokens, num_choices)
        return Prepared(generation, usage, [p for p in prompts for _ in range(num_choices)])

    def _choice(self, request: ApiRequest, prompt: Prompt, index: int, request_id: str) -> Choice:
        rules = StopRules(
            texts=tuple(request.stops),
            token_ids=frozenset(request.stop_token_ids or ()),
            include_in_output=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
        )
        detokenizer = self.codec.detokenizer(
            prompt.token_ids, skip_special_tokens=request.skip_special_tokens is not False
        )
        return Choice(index, request_id, detokenizer, rules, is_scoring=request.max_tokens == 0)

    async def _bad_words(self, request: ApiRequest) -> TokenSequences:
        if not request.bad_words:
            return ()
        spellings = await self.codec.encode(
            bad_word_spellings(request.bad_words), add_special_tokens=False
        )
        return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))

    async def _prompts(
        self, request: ApiRequest, num_choices: int, limits: ModelLimits
    ) -> list[Prompt]:
        if isinstance(request, ChatCompletionRequest):
            prompts = [Prompt(await self.encode_chat(request.messages, request))]
        else:
            prompts = await self._completion_prompts(request, num_choices, limits)
        if request.truncate_prompt_tokens is None:
            return prompts
        room = request.truncate_prompt_tokens
        if room < 0:
            room = room_for_prompt(request, limits)
        return [prompt.last(room) for prompt in prompts]

    async def _completion_prompts(
        self, request: CompletionRequest, num_choices: int, limits: ModelLimits
    ) -> list[Prompt]:
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
        check_size(texts, "prompt")
        if request.has_echo:
            skip_special_tokens = request.skip_special_tokens is not False
            prompts = await self.codec.encode_prompts(texts) + await self.codec.decode_prompts(
                id_lists, skip_special_tokens=skip_special_tokens
            )
        else:
            id_lists = await self.codec.encode(texts) if texts else id_lists
            prompts = [Prompt(token_ids) for token_ids in id_lists]
        if not all(prompt.token_ids for prompt in prompts):
            raise InvalidRequestError(
                "The prompt is empty; it needs at least 1 token.", param="prompt"
            )
        return prompts

    async def encode_chat(
        self, messages: Sequence[ChatMessage], fields: TemplateFields
    ) -> list[int]:
        """The token ids of a conversation. Raises InvalidRequestError."""
        if fields.continue_final_message and fields.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt"
                " begins a new one: set one of them to false.",
                param="continue_final_message",
            )
        texts = [_text_of(message, place) for place, message in enumerate(messages)]
        check_size(texts, "messages")
        rendered = [
            message.model_dump(exclude_unset=True) | {"content": text}
            for message, text in zip(messages, texts, strict=True)
        ]
        conversation = Conversation(
            rendered,
            add_generation_prompt=fields.has_generation_prompt,
            continue_final_message=bool(fields.continue_final_message),
            variables=fields.chat_template_kwargs or {},
        )
        try:
            return await self.codec.encode_chat(conversation)
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error), param="messages") from error


def _of_choice(
    params: SamplingParams, request: ApiRequest, seed: int, choice: int
) -> SamplingParams:
    """The parameters of one of several choices: its own seed, and for a chat no second rating of
    the one prompt."""
    params = msgspec.structs.replace(params, seed=seed_of_choice(seed, choice))
    if choice and isinstance(request, ChatCompletionRequest):
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return params


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


def _text_of(message: ChatMessage, place: int) -> str:
    """The text of a message in one piece, which is what chat templates expect. Only a message of
    the model's own may lack one, and has an empty one then."""
    param = f"messages.{place}.content"
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(f"{param} is missing.", param=param)
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                "This model reads text only: content parts must have the type text.",
                param=param,
            )
        texts.append(part.text)
    return "\n".join(texts)


def check_size(texts: list[str], param: str) -> None:
    """Raises InvalidRequestError for more text than is read."""
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_PROMPT_BYTES:
        raise InvalidRequestError(
            f"{param} hold {num_bytes} bytes of text; at most {MAX_PROMPT_BYTES} are read.",
            param=param,
        )
