"""A load test's side of HTTP: its connections, one request, and what its stream told when."""

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp
import msgspec

from cluster.bench_options import BenchEndpoint
from cluster.bench_prompts import BenchRequest
from cluster.errors import CommandError

_PATHS: dict[BenchEndpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_CONNECT_SECONDS = 30.0
_MAX_ERROR_CHARS = 200
_DONE = b"[DONE]"


def open_session(
    api_key: str | None, *, timeout_seconds: float | None = None
) -> aiohttp.ClientSession:
    """As many connections as there are requests, each for as long as its answer takes, but for no
    longer than `timeout_seconds` without a byte."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds
        ),
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The one that the server names first. Raises CommandError."""
    try:
        async with session.get(f"{url}/v1/models") as answer:
            if answer.status != 200:
                raise _refusal(url, answer.status, await _http_error(answer))
            return str((await answer.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CommandError(
            f"No server answers at {url}: {error}. Name another with --url."
        ) from error
    except (LookupError, TypeError, ValueError) as error:
        raise CommandError(f"{url}/v1/models names no model; name one with --model.") from error


def _refusal(url: str, status: int, error: str) -> CommandError:
    error = error.rstrip(".")
    if status in (401, 403):
        return CommandError(
            f"The key is missing or wrong: {url}/v1/models answers {error}. Name the file that "
            f"holds it with --api-key-file."
        )
    return CommandError(
        f"{url}/v1/models answers {error}. Name another server with --url, or the model with "
        f"--model."
    )


@dataclass(slots=True)
class Outcome:
    """What one request brought, in seconds on the clock of this process."""

    sent_seconds: float
    token_seconds: list[float] = field(default_factory=list)
    """When each piece of the stream that has a token came."""
    text: str = ""
    prompt_tokens: int | None = None
    """As the server counts them, or else the token ids that it was sent; None: it got a text."""
    output_tokens: int | None = None
    """As the server counts them; None: it does not say."""
    cached_tokens: int = 0
    preemptions: int = 0
    stalled_ms: float = 0.0
    error: str | None = None
    """None: all went well."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_seconds) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_seconds(self) -> float:
        return self.token_seconds[0] - self.sent_seconds

    @property
    def e2e_seconds(self) -> float:
        return self.token_seconds[-1] - self.sent_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.token_seconds[-1] - self.token_seconds[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_seconds(self) -> list[float]:
        """Between the pieces of the stream."""
        pairs = zip(self.token_seconds, self.token_seconds[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Preemption(msgspec.Struct):
    count: int = 0
    stalled_ms: float = 0.0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    preemption: _Preemption | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What `reasoning` was called before; some servers send both."""
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str | None:
        """None: this is not about a text, as the chunk that only says who speaks."""
        texts = (self.reasoning or self.reasoning_content, self.content)
        given = [text for text in texts if text is not None]
        said = "".join(given)
        return said if said or (given and self.role is None) else None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def said(self) -> str | None:
        """None: nothing, not even a text that is still empty."""
        return self.text if self.delta is None else self.delta.text

    @property
    def has_token(self) -> bool:
        calls_tool = self.delta is not None and bool(self.delta.tool_calls)
        return calls_tool or self.said is not None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchClient:
    """How requests are sent."""

    session: aiohttp.ClientSession
    base_url: str
    endpoint: BenchEndpoint
    model: str
    fields: Body
    """What every request has besides prompt, model, length and streaming."""

    def body(self, request: BenchRequest) -> Body:
        body: Body = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.max_tokens
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.max_tokens
        return body

    async def ask(self, request: BenchRequest) -> Outcome:
        """Send one request and read its stream to the end. What goes wrong is in the outcome."""
        data = msgspec.json.encode(self.body(request))
        headers = {"content-type": "application/json"}
        outcome = Outcome(time.perf_counter(), prompt_tokens=request.num_token_ids)
        try:
            async with self.session.post(
                self.base_url + _PATHS[self.endpoint], data=data, headers=headers
            ) as answer:
                if answer.status != 200:
                    outcome.error = await _http_error(answer)
                    return outcome
                await _read(answer.content, outcome)
        except aiohttp.SocketTimeoutError:
            outcome.error = f"no byte came for {self.session.timeout.sock_read:g} s"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        except msgspec.DecodeError as error:
            outcome.error = f"a chunk of the stream is not what OpenAI's API has: {error}"
        if outcome.error is None and not outcome.token_seconds:
            outcome.error = "the stream ended without a token"
        return outcome


async def _read(stream: aiohttp.StreamReader, outcome: Outcome) -> None:
    rest = b""
    is_done = False
    async for data in stream.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for content in map(_content, lines):
            if content == _DONE:
                is_done = True
            elif content is not None:
                _take(_decode(content), outcome, now)
    # The last line may lack its end; any other without one is half a chunk.
    is_done = is_done or _content(rest) == _DONE
    if not is_done and outcome.error is None:
        outcome.error = "the stream broke off"


def _content(line: bytes) -> bytes | None:
    """Of a line of the stream; None: it is empty, or about the stream itself."""
    return line[5:].strip() if line.startswith(b"data:") else None


def _take(chunk: _Chunk, outcome: Outcome, now: float) -> None:
    if chunk.error is not None:
        outcome.error = _message(msgspec.json.encode({"error": chunk.error}).decode())
        return
    choices = chunk.choices or ()
    if any(choice.has_token for choice in choices):
        outcome.token_seconds.append(now)
        outcome.text += "".join(choice.said or "" for choice in choices)
    usage = chunk.usage
    if usage is None:
        return
    outcome.output_tokens = usage.completion_tokens
    if usage.prompt_tokens is not None:
        outcome.prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    if usage.preemption is not None:
        outcome.preemptions = usage.preemption.count
        outcome.stalled_ms = usage.preemption.stalled_ms


async def _http_error(answer: aiohttp.ClientResponse) -> str:
    """The status of a refusal, and what the server says to it."""
    said = _message(await answer.text(errors="replace"))
    return f"HTTP {answer.status}: {said or answer.reason}"


def _message(body: str) -> str:
    """What an error says in the words of its server."""
    try:
        error = msgspec.json.decode(body)["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, KeyError, TypeError):
        said = body
    return str(said)[:_MAX_ERROR_CHARS]
