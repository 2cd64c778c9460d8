"""The requests of the OpenAI API, as pydantic models: what is understood and in which ranges.

Fields that are not listed are ignored, and so is null. What depends on the model (its vocabulary,
its context length) is checked by `cluster.sampling`.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_SEQUENCES = 256
MAX_STOPS = 4
MAX_MESSAGES = 1024
MAX_PROMPT_BYTES = 4 << 20
MAX_SHORT_CHARACTERS = 128


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


def _list_kind(value: object, of_text: str, otherwise: str) -> str:
    return of_text if isinstance(value, str) else otherwise


def _prompt_kind(value: object) -> str:
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, str):
            return "#texts"
        return "#token id lists" if isinstance(first, list) else "#token ids"
    return "#texts" if isinstance(value, list) else "#text"


TokenIds: TypeAlias = Annotated[list[int], Field(min_length=1)]
Prompt: TypeAlias = Annotated[
    Annotated[Text, Tag("#text")]
    | Annotated[list[Text], Field(min_length=1), Tag("#texts")]
    | Annotated[TokenIds, Tag("#token ids")]
    | Annotated[list[TokenIds], Field(min_length=1), Tag("#token id lists")],
    Discriminator(_prompt_kind),
]

StopText: TypeAlias = Annotated[Text, Field(min_length=1)]
Stop: TypeAlias = Annotated[
    Annotated[StopText, Tag("#text")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("#texts")],
    Discriminator(lambda value: _list_kind(value, "#text", "#texts")),
]


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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Token id (as a text, because JSON has no other keys) to what is added to its logit."""
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Stop | None = None

    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    """Smaller is more urgent."""
    cache_salt: ShortText | None = None
    """Requests find each other's cached prefixes only under the same salt."""

    best_of: Any = None
    bad_words: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    truncate_prompt_tokens: Any = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    echo: Any = None
    suffix: Any = None


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
            Annotated[Text, Tag("#text")] | Annotated[list[TextPart], Tag("#parts")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None


class ChatCompletionRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of `max_tokens`, and the one that counts if both are there."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    continue_final_message: Any = None
    function_call: Any = None
    functions: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None


ApiRequest: TypeAlias = CompletionRequest | ChatCompletionRequest
Endpoint: TypeAlias = Literal["completions", "chat"]

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
}
"""Fields that are known but not built, and the values of theirs that change nothing."""
