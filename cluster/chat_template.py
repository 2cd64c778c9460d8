"""The chat template that comes with a model, rendered in a sandbox.

What templates may rely on (filters, functions, whitespace rules) is what transformers gives them;
transformers itself would bring torch into every process that handles HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


# Put behind the last message to see where the template lets it end. Nobody writes it by chance.
_END_MARK = "\ue000end of the message\ue001"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and how they are to be rendered."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    """End with what introduces an answer."""
    continue_final_message: bool = False
    """End with the last message, as if it were not complete; goes without a generation prompt."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Given to the template beside its own."""


class ChatTemplateError(Exception):
    """These messages cannot be rendered; the message is for whoever sent them."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on, which says nothing to a server."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ChatTemplateError if `source` is no template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template is broken: {error}.") from error
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: Conversation) -> str:
        """The prompt.

        Raises ChatTemplateError when the template refuses the messages or cannot read them.
        """
        if taken := sorted(_OWN_VARIABLES & conversation.variables.keys()):
            raise ChatTemplateError(
                f"chat_template_kwargs may not set {', '.join(taken)}: the server does."
            )
        if not conversation.continue_final_message:
            return self._render(conversation, conversation.messages)
        *earlier, final = conversation.messages
        if not isinstance(final.get("content"), str):
            raise ChatTemplateError(
                "continue_final_message needs a last message with a text to go on with."
            )
        marked = {**final, "content": f"{final['content']}{_END_MARK} "}
        prompt, mark, rest = self._render(conversation, [*earlier, marked]).rpartition(_END_MARK)
        if not mark:
            raise ChatTemplateError(
                "The model's chat template does not show the last message as it is, so nothing can"
                " go on with it."
            )
        # A template that takes the space at the end away would do so without the mark, too.
        return prompt if rest.startswith(" ") else prompt.rstrip()

    def _render(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
        own = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            prompt = self._template.render(
                self._special_tokens | dict(conversation.variables) | own
            )
            prompt.encode()  # half of a surrogate pair is no text
            return prompt
        except Exception as error:
            # A template is a program whose input is the client's: all it stumbles over, in
            # whatever way, are these messages.
            reason = str(error)[:200].rstrip(".") or type(error).__name__
            raise ChatTemplateError(
                f"The model's chat template cannot render these messages: {reason}."
            ) from error


def find_chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The source of a model's template; `settings` are those of tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja2's own, which escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
