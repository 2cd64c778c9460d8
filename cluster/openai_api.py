"""The requests of the OpenAI API, as pydantic models: what is understood and in which ranges.

Fields that are not listed are ignored, and so is null. What depends on the model (its vocabulary,
its context length) is checked by `cluster.sampling`.
"""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_SEQUENCES = 256
MAX_STOPS = 4
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_ABORTS = 1024
MAX_MESSAGES = 1024
MAX_PROMPT_BYTES = 4 << 20
MAX_SHORT_CHARACTERS = 128
# What would keep the event loop busy for long if there were more of them.
MAX_PROMPT_TOKEN_IDS = 1 << 20
MAX_LISTED_TOKEN_IDS = 1 << 18
MAX_BIASES = 1 << 14
MAX_CONTENT_PARTS = 4096


class ApiModel(BaseModel):
    """Strict: `true` is no number, and "16" is a text."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text and cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("not_unicode", "no text") from None
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_unicode)]
ShortText: TypeAlias = Annotated[
    str, Field(max_length=MAX_SHORT_CHARACTERS), AfterValidator(_unicode)
]


T = TypeVar("T")
ListOf: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""The client is told of one complaint; to collect a million would keep everybody for half a
minute."""


def _list_kind(value: object, of_text: str, otherwise: str) -> str:
    return of_text if isinstance(value, str) else otherwise


def _prompt_kind(value: object) -> str:
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, str):
            return "#texts"
        return "#token id lists" if isinstance(first, list) else "#token ids"
    return "#texts" if isinstance(value, list) else "#text"


TokenIds: TypeAlias = Annotated[ListOf[int], Field(min_length=1, max_length=MAX_PROMPT_TOKEN_IDS)]
Several = Field(min_length=1, max_length=MAX_SEQUENCES)
Prompt: TypeAlias = Annotated[
    Annotated[Text, Tag("#text")]
    | Annotated[ListOf[Text], Several, Tag("#texts")]
    | Annotated[TokenIds, Tag("#token ids")]
    | Annotated[ListOf[TokenIds], Several, Tag("#token id lists")],
    Discriminator(_prompt_kind),
]

ListedTokenIds: TypeAlias = Annotated[ListOf[int], Field(max_length=MAX_LISTED_TOKEN_IDS)]
BadWord: TypeAlias = Annotated[ShortText, Field(min_length=1)]
StopText: TypeAlias = Annotated[Text, Field(min_length=1)]
Stop: TypeAlias = Annotated[
    Annotated[StopText, Tag("#text")]
    | Annotated[ListOf[StopText], Field(max_length=MAX_STOPS), Tag("#texts")],
    Discriminator(lambda value: _list_kind(value, "#text", "#texts")),
]


def _few_biases(value: object) -> object:
    """Before their values are looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "too many", {"max_length": MAX_BIASES})
    return value


Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Biases: TypeAlias = Annotated[dict[str, Bias], BeforeValidator(_few_biases)]


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    """One more chunk before the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Usage so far on every chunk."""


class GenerationRequest(ApiModel):
    """What both endpoints share."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    """Token id (as a text, because JSON has no other keys) to what is added to its logit."""
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Stop | None = None

    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-4, le=1e4)
    """More than 0; beyond these it would be 0 or infinite to the sampler."""
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: ListedTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[ListOf[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Words whose token sequences are never completed. Other tokens may still spell them."""
    allowed_token_ids: Annotated[ListedTokenIds, Field(min_length=1)] | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    """Smaller is more urgent."""
    cache_salt: ShortText | None = None
    """Requests find each other's cached prefixes only under the same salt."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Rate the tokens of the prompt, with as many alternatives for each."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep only so many of the prompt's last tokens; -1: as many as leave room for the output."""
    return_token_ids: bool | None = None

    best_of: Any = None
    response_format: Any = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


def _none_if_false(value: object) -> object:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    """0 goes with `echo` only: then the prompt is rated and nothing is generated."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_none_if_false)
    ] = None
    """Rate each token of the text, with as many alternatives."""

    suffix: Any = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        return bool(self.echo)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """For `prompt_logprobs`, and for the prompt's part of the text."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)


class TextPart(ApiModel):
    type: Text
    text: Text | None = None


def _content_kind(value: object) -> str:
    return _list_kind(value, "#text", "#parts")


class ChatMessage(ApiModel):
    """One message. What else it carries (tool calls, a name) is given to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: ShortText
    content: (
        Annotated[
            Annotated[Text, Tag("#text")] | Annotated[ListOf[TextPart], Tag("#parts")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None


def _few_parts(value: object) -> object:
    """Before the parts are looked at: each takes microseconds, and there may be a million."""
    messages = value if isinstance(value, list) else []
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_CONTENT_PARTS:
        raise PydanticCustomError(
            "too_many_parts",
            "{num_parts} content parts, of at most {limit} together",
            {"num_parts": num_parts, "limit": MAX_CONTENT_PARTS},
        )
    return value


Messages: TypeAlias = Annotated[
    ListOf[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_few_parts),
]


class TemplateFields(ApiModel):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message, instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    @property
    def has_generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages

    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of `max_tokens`, and the one that counts if both are there."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    echo: bool | None = None
    """For completions only."""
    function_call: Any = None
    functions: Any = None
    tool_choice: Any = None
    tools: Any = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def has_echo(self) -> bool:
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


class TokenizeRequest(TemplateFields):
    """Body of `POST /tokenize`: a text, or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    """Of a text; what a conversation needs is in the chat template."""
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiModel):
    """Body of `POST /detokenize`."""

    model: Text | None = None
    tokens: Annotated[ListOf[int], Field(max_length=MAX_PROMPT_TOKEN_IDS)]


class AbortRequest(ApiModel):
    """Body of `POST /abort`."""

    request_ids: Annotated[ListOf[ShortText], Field(min_length=1, max_length=MAX_ABORTS)]


ApiRequest: TypeAlias = CompletionRequest | ChatCompletionRequest
Endpoint: TypeAlias = Literal["completions", "chat"]

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields that are known but not built, and the values of theirs that change nothing."""
