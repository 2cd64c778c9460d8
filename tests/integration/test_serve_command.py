"""`palimpsest serve` as people run it: one command, the default model, real HTTP, and Ctrl-C."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from tokenizers import Tokenizer

from cluster.probe import Probe
from tests.support.asking import ask, ask_all, with_client
from tests.support.events import Stream
from tests.support.leftovers import Leftovers, assert_nothing_left
from tests.support.references import REFERENCES_FILE
from tests.support.serving import HOST, ORIGIN, free_port

# The model is fetched and converted on the first run of all.
pytestmark = [pytest.mark.timeout(func_only=True), pytest.mark.xdist_group("serve command")]

START_SECONDS = 240.0
STOP_SECONDS = 60.0
COMPLETIONS = "/v1/completions"
MODEL = "smollm2-135m"


def palimpsest(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("palimpsest")), *arguments]


def without_test_settings() -> dict[str, str]:
    """The environment of a user, who has set nothing of Ray's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@dataclass(slots=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int
    output_file: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while "Ctrl-C stops the server" not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def interrupt(self) -> int:
        """What Ctrl-C does in a terminal: the signal goes to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_SECONDS)


def start(
    output_file: Path,
    *overrides: str,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """`environment` is added to the user's."""
    port = port or free_port()
    settings = [f"--set={override}" for override in ("model.dtype=float32", *overrides)]
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            palimpsest("serve", "--port", str(port), "--allowed-origins", ORIGIN, *settings),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**without_test_settings(), **(environment or {})},
            start_new_session=True,
        )
    return Server(process, port, output_file)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    before = Leftovers.now()
    server = start(tmp_path_factory.mktemp("serve") / "output")
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
    assert_nothing_left(before)


def test_what_it_prints_can_be_pasted(server: Server) -> None:
    command = re.search(r"curl .*?\n.*?'\n", server.output, re.DOTALL)
    assert command is not None, server.output
    limited = command[0].rstrip().removesuffix("}'") + ', "max_tokens": 8}\''
    answer = subprocess.run(limited, shell=True, capture_output=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
    assert f'base_url="{server.url}/v1"' in server.output
    assert re.search(r"KV cache: \d+ blocks of 16 tokens hold \d+ tokens", server.output)


def test_headers_are_ours_not_those_of_serve(server: Server) -> None:
    headers = {b"origin": ORIGIN.encode(), b"x-request-id": "ä".encode("latin-1")}
    answer = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    [request_id] = answer.headers.get_list("x-request-id")
    assert request_id.isascii()


def test_the_text_is_that_of_the_model(server: Server) -> None:
    """Greedy continuations recorded with transformers."""
    references = json.loads(REFERENCES_FILE.read_text())[MODEL][:2]
    found = Tokenizer.from_file(str(model_directory() / "tokenizer.json"))
    body = {
        "temperature": 0,
        "max_tokens": 64,
        "prompt": [r["prompt_token_ids"] for r in references],
    }
    answer = with_client(server.url, lambda client: ask(client, COMPLETIONS, body))
    assert answer.texts == {
        index: found.decode(reference["output_token_ids"])
        for index, reference in enumerate(references)
    }


def model_directory() -> Path:
    from worker.models.directory import find_model

    return find_model(MODEL)


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Name a colour."}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert len(stream.response.headers.get_list("x-request-id")) == 1
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage is not None
        with pytest.raises(openai.BadRequestError, match="50000, but the maximum context"):
            client.completions.create(model=MODEL, prompt="x", max_tokens=50_000)


def test_load(server: Server) -> None:
    """64 requests, 32 at a time: none fails, and each has as many tokens as it asked for."""
    body = {"prompt": "One two three", "ignore_eos": True, "max_tokens": 8, "stream": True}

    async def run(client: httpx.AsyncClient) -> list[int]:
        places = asyncio.Semaphore(32)

        async def one() -> int:
            async with places:
                tokens: int = (await ask(client, COMPLETIONS, body)).usage["completion_tokens"]
                return tokens

        return await asyncio.gather(*(one() for _ in range(64)))

    assert with_client(server.url, run) == [8] * 64


def test_probes_answer_beside_300_open_streams(server: Server) -> None:
    body = {"prompt": "One two three", "ignore_eos": True, "max_tokens": 4000, "stream": True}

    async def run(client: httpx.AsyncClient) -> float:
        streams = [client.stream("POST", COMPLETIONS, json=body) for _ in range(300)]
        answers = await asyncio.gather(*(stream.__aenter__() for stream in streams))
        assert {answer.status_code for answer in answers} == {200}
        slowest_seconds = 0.0
        for path in ("/health", "/ready", "/health"):
            began = time.monotonic()
            assert (await client.get(path)).status_code == 200
            slowest_seconds = max(slowest_seconds, time.monotonic() - began)
        await asyncio.gather(*(stream.__aexit__(None, None, None) for stream in streams))
        return slowest_seconds

    assert with_client(server.url, run) < 10, "a second is the aim"
    deadline = time.monotonic() + 5
    while (counters := counters_by_status())["open_requests"]:
        assert time.monotonic() < deadline, counters
        time.sleep(0.2)


def counters_by_status() -> dict[str, int]:
    """As another command tells them."""
    answer = subprocess.run(
        palimpsest("status", "--json"),
        capture_output=True,
        check=True,
        env=without_test_settings(),
        timeout=60,
    )
    (status,) = json.loads(answer.stdout)
    counters: dict[str, int] = status["counters"]
    return counters


def test_a_second_server_on_the_same_port_says_so(server: Server) -> None:
    second = subprocess.run(
        palimpsest("serve", "--port", str(server.port)),
        capture_output=True,
        text=True,
        env=without_test_settings(),
        timeout=60,
        check=False,
    )
    assert second.returncode == 2
    message = second.stderr.strip().splitlines()[-1]
    assert message.startswith(f"Cannot listen on {HOST}:{server.port}")
    assert "--port" in message


def test_sigterm_lets_streams_finish_and_ctrl_c_ends_them(server: Server) -> None:
    """And nothing is left, for which the fixture looks too."""
    body = {"prompt": "One two three", "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json={**body, "max_tokens": 4000}) as long,
        client.stream("POST", COMPLETIONS, json={**body, "max_tokens": 60}) as short,
    ):
        rest = [(next(lines := stream.iter_lines()), lines) for stream in (long, short)]
        server.process.terminate()
        while Probe(server.url).state().name != "draining":
            time.sleep(0.05)
        refused = client.post(COMPLETIONS, json=body)
        assert refused.status_code == 503
        assert "the server is being stopped" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert Stream().read([rest[1][0], *rest[1][1]]).finishes == {0: "length"}
        assert server.process.poll() is None, "there is time for the other one"
        assert server.interrupt() == 0, server.output
        ended = Stream().read([rest[0][0], *rest[0][1]])
        assert ended.error is not None
        assert "the server is being stopped" in ended.error["message"]
    assert "Finishing what runs, for at most 600 s" in server.output
    assert not list(Path("/", "tmp", "ray").glob(f"session_*_{server.process.pid}"))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_alone(tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM all that ran has its full length; Ctrl-C ends it, with a word."""
    before = Leftovers.now()
    server = start(tmp_path / "output", "server.drain_seconds=100")
    server.wait_ready()
    body = {"prompt": "One two three", "ignore_eos": True, "max_tokens": 300, "stream": True}

    async def run(client: httpx.AsyncClient) -> list[Stream]:
        async def one() -> Stream:
            async with client.stream("POST", COMPLETIONS, json=body) as answer:
                begun.release()
                return Stream().read([line async for line in answer.aiter_lines()])

        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(one()) for _ in range(8)]
        for _ in streams:
            await begun.acquire()
        if number is signal.SIGTERM:
            server.process.terminate()
        else:
            os.killpg(server.process.pid, number)
        return await asyncio.gather(*streams)

    streams = with_client(server.url, run)
    assert server.process.wait(STOP_SECONDS) == 0, server.output
    if number is signal.SIGTERM:
        assert [stream.finishes for stream in streams] == [{0: "length"}] * 8
    else:
        assert all("being stopped" in str(stream.error) for stream in streams)
    assert_nothing_left(before)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    """Nothing runs on, `palimpsest stop` removes the files, and the port is free at once."""
    before = Leftovers.now()
    state = {"XDG_STATE_HOME": str(tmp_path)}
    killed = start(tmp_path / "output", environment=state)
    killed.wait_ready()
    killed.process.kill()
    killed.process.wait()
    assert_nothing_left(before)
    sessions = f"session_*_{killed.process.pid}"
    assert list(Path("/", "tmp", "ray").glob(sessions))
    stopped = subprocess.run(
        palimpsest("stop"),
        capture_output=True,
        text=True,
        env=without_test_settings() | state,
        timeout=60,
        check=True,
    )
    assert "Removed what is left of 1 killed `palimpsest serve`." in stopped.stdout
    assert not list(Path("/", "tmp", "ray").glob(sessions))
    again = start(tmp_path / "again", port=killed.port, environment=state)
    again.wait_ready()
    assert again.interrupt() == 0, again.output
    assert_nothing_left(before)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_several_replicas_behind_the_proxy_of_serve(tmp_path: Path) -> None:
    """Streams and whole answers through both, the same text from each; and nothing is left."""
    before = Leftovers.now()
    server = start(tmp_path / "output", "server.num_replicas=2")
    try:
        server.wait_ready()
        body = {"prompt": "One two three", "temperature": 0, "max_tokens": 24}
        work = [(COMPLETIONS, {**body, "stream": number % 2 == 0}) for number in range(24)]
        answers = ask_all(server.url, work)
        assert len({answer.texts[0] for answer in answers}) == 1
        assert {answer.usage["completion_tokens"] for answer in answers} == {24}
        answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        replicas = [
            process
            for process in psutil.Process(server.process.pid).children(recursive=True)
            if " ".join(process.cmdline()).startswith("ray::ServeReplica")
        ]
        assert len(replicas) == 2
        endless = {**body, "ignore_eos": True, "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=endless, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert server.interrupt() == 0, server.output
            assert [line for line in lines if line][-1] == "data: [DONE]"
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
    assert_nothing_left(before)
