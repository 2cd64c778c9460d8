"""/tokenize and /detokenize."""

from typing import Any

import httpx
import pytest

from tests.support.http_server import MODEL, HttpServer, http_server, parrot
from tests.support.tokenizers import byte_fallback

MESSAGES = [{"role": "user", "content": "one 😀"}]
RENDERED = "<|im_start|>user\none 😀<|im_end|>\n"
GENERATION = "<|im_start|>assistant\n"


def tokenize(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def test_a_text(http: httpx.Client, server: HttpServer) -> None:
    found = tokenize(http, prompt="one 😀", model=MODEL, return_token_strs=True)
    token_ids = server.encode("one 😀")
    assert found == {
        "count": len(token_ids),
        "max_model_len": 2048,
        "tokens": token_ids,
        "token_strs": [server.tokenizer.id_to_token(token_id) for token_id in token_ids],
    }
    assert tokenize(http, prompt="one")["token_strs"] is None
    assert tokenize(http, prompt="")["tokens"] == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, RENDERED + GENERATION),
        ({"add_generation_prompt": False}, RENDERED),
        ({"continue_final_message": True}, "<|im_start|>user\none 😀"),
    ],
)
def test_a_conversation(http: httpx.Client, server: HttpServer, fields: Any, text: str) -> None:
    found = tokenize(http, messages=MESSAGES, **fields)
    assert found["tokens"] == server.encode(text)
    assert found["count"] == len(found["tokens"])


def test_special_tokens_in_front_of_a_text() -> None:
    with (
        http_server(model=parrot(byte_fallback())) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert tokenize(client, prompt="on")["tokens"][0] == 1
        assert tokenize(client, prompt="on", add_special_tokens=False)["tokens"][0] != 1


def test_there_and_back(http: httpx.Client) -> None:
    text = "one <|im_end|> 한국 😀"
    token_ids = tokenize(http, prompt=text)["tokens"]
    answer = http.post("/detokenize", json={"tokens": token_ids})
    assert answer.json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x" * ((4 << 20) + 1)}, 400, "at most 4194304"),
        ("/tokenize", {"prompt": 5}, 400, "must be a text"),
        ("/tokenize", {"prompt": "x", "model": "y"}, 404, "The model `y` does not exist"),
        ("/tokenize", {"messages": []}, 400, "must not be empty"),
        ("/detokenize", {"tokens": [378]}, 400, "378; those of this model are 0 to 377"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1; those of this model"),
        ("/detokenize", {"tokens": "x"}, 400, "must be a list"),
        ("/detokenize", {"tokens": [1], "model": "y"}, 404, "does not exist"),
        ("/detokenize", {}, 400, "tokens is missing"),
    ],
)
def test_mistakes(http: httpx.Client, path: str, body: Any, status: int, words: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
