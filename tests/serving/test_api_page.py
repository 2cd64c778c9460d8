"""docs/api.md tells of every field and every path."""

from pathlib import Path

import httpx

from cluster.openai_api import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
# Old names, which are refused unless they are neutral.
NOT_TOLD = {"best_of", "suffix", "function_call", "functions"}


def test_every_field_is_told_of() -> None:
    models = (
        CompletionRequest,
        ChatCompletionRequest,
        TokenizeRequest,
        DetokenizeRequest,
        AbortRequest,
    )
    fields = {name for model in models for name in model.model_fields} - NOT_TOLD
    assert not {name for name in fields if f"`{name}`" not in PAGE}


def test_every_path_is_told_of(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert not {path for path in paths if path.replace("{name}", "{id}") not in PAGE}
