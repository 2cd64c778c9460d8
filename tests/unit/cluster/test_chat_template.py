"""Chat templates: what they may rely on, and what they may not do."""

import pytest

from cluster.chat_template import ChatTemplate, ChatTemplateError, Conversation

MESSAGES = [{"role": "user", "content": "Hé <b>"}, {"role": "assistant", "content": "Ho"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        Conversation(MESSAGES, variables=variables or {})
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hé <b>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hé <b>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for m in messages %}\n    {% break %}\n{% endfor %}\nend", "end"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "Ho!"),
        ("{{ add_generation_prompt }} {{ tools }} {{ documents }}", "True None None"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{{ mood }}", "calm"),
    ],
)
def test_what_a_template_may_rely_on(source: str, text: str) -> None:
    assert render(source, mood="calm") == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Only two roles.') }}", "Only two roles"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 'x' + messages }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_it_stumbles_over_is_the_clients_to_know(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages") as caught:
        render(source)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_servers_own_variables_cannot_be_replaced() -> None:
    with pytest.raises(ChatTemplateError, match="may not set messages"):
        render("{{ messages }}", messages=[])


def test_a_broken_template_is_told_at_once() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% if %}", {})
