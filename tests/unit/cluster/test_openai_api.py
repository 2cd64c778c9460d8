"""What a body costs that is wrong in many places: its client is told of one."""

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.openai_api import (
    AbortRequest,
    ApiModel,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

MANY = 20_000
WRONG: list[Any] = [
    [{}] * MANY,
    [1, *[{}] * MANY],
    ["x", *[{}] * MANY],
    [[{}] * 100] * 256,
    [["x"] * 100] * 256,
    [{"content": [{}] * 100}] * 40,
    {str(key): "x" for key in range(MANY)},
]


@pytest.mark.parametrize(
    "model",
    [AbortRequest, ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest],
)
def test_few_mistakes_are_collected(model: type[ApiModel]) -> None:
    bodies = [{name: wrong} for name in model.model_fields for wrong in WRONG]
    assert 0 < max(num_mistakes(model, body) for body in bodies) < 10


def num_mistakes(model: type[ApiModel], body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0
