"""Applications on Ray Serve, for tests that talk to them over HTTP."""

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from cluster.app import application
from cluster.engine_spec import EngineSpec
from cluster.probe import Probe
from cluster.supervisor import existing_supervisors
from configs import Config, load
from tests.support.engines import status_of, stop
from tests.support.events import Stream
from tests.support.tokenizers import byte_level

HOST = "127.0.0.1"
READY_SECONDS = 90.0

# Plain, and of few tokens: the small model knows no chats.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def ready_to_serve(model: Path, folder: Path) -> Path:
    """A copy of a model directory, with a template for conversations, and with a tokenizer if it
    is a stand-in that has none."""
    copy = Path(shutil.copytree(model, folder / "model"))
    for path in copy.iterdir():
        path.chmod(0o644)
    if not (copy / "tokenizer.json").exists():
        byte_level().save(str(copy / "tokenizer.json"))
    (copy / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return copy


@dataclass(slots=True)
class App:
    """A deployed application that is ready."""

    name: str
    url: str
    config: Config
    spec: EngineSpec

    def redeploy(self, **changes: Any) -> None:
        """Deploy it again over the same engine, with other settings of the HTTP side."""
        server = self.config.server.model_copy(update=changes)
        config = self.config.model_copy(update={"server": server})
        serve.run(application(config, self.spec), name=self.name, route_prefix=f"/{self.name}")

    def wait_idle(self, timeout_seconds: float = 5.0) -> None:
        """Returns when the engine has nothing left; raises AssertionError if that takes longer."""
        deadline = time.monotonic() + timeout_seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"still there after {timeout_seconds} s: {left}"

    def counters(self) -> Any:
        status = asyncio.run(status_of(self.name))
        assert status.scheduler is not None
        return status.scheduler.counters

    def worker_pids(self) -> list[int]:
        return [place.process_id for place in asyncio.run(status_of(self.name)).places]

    def _left(self) -> dict[str, int]:
        counters = self.counters()
        counts = {"open requests": counters.open_requests, "held blocks": counters.held_blocks}
        return {what: count for what, count in counts.items() if count}


@contextlib.contextmanager
def deployed(name: str, port: int, *overrides: str) -> Iterator[App]:
    """An application at `/name`; Serve must listen on `port`. Its engine ends with it."""
    config = load(overrides=overrides, environ={}).config
    spec = EngineSpec.of(config)
    app = App(name, f"http://{HOST}:{port}/{name}", config, spec)
    try:
        serve.run(application(config, spec), name=name, route_prefix=f"/{name}")
        _wait_ready(app)
        yield app
    finally:
        serve.delete(name)
        asyncio.run(stop(name))


def _wait_ready(app: App) -> None:
    probe, deadline = Probe(app.url), time.monotonic() + READY_SECONDS
    while not (state := probe.state()).is_ready:
        assert not state.has_failed, state.reason
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


@contextlib.contextmanager
def serve_on(port: int) -> Iterator[None]:
    """Ray Serve on the Ray cluster of this process, listening on its first node."""
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
    try:
        yield
    finally:
        assert not existing_supervisors(), "an engine is left"
        serve.shutdown()


@dataclass(slots=True)
class Answered:
    """One request's answer, streamed or not, in one form."""

    texts: dict[int, str]
    finishes: dict[int, str]
    usage: dict[str, Any]
    preemption: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> tuple[object, ...]:
        """What must not depend on interruptions, nor on what the cache held."""
        counts = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return self.texts, self.finishes, counts


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answered:
    """Send one request; raises AssertionError unless it is answered well."""
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        choices = content["choices"]
        return _answered(
            {c["index"]: c.get("text") or c.get("message", {}).get("content", "") for c in choices},
            {c["index"]: c["finish_reason"] for c in choices},
            content["usage"],
        )
    body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        stream = Stream().read([line async for line in answer.aiter_lines()])
    assert stream.error is None, stream.error
    assert stream.usage is not None
    return _answered(stream.texts, stream.finishes, stream.usage)


def _answered(texts: dict[int, str], finishes: dict[int, str], usage: dict[str, Any]) -> Answered:
    return Answered(texts, finishes, usage, usage.get("preemption", {}))


def ask_all(
    url: str, jobs: list[tuple[str, dict[str, Any]]], *, timeout_seconds: float = 120
) -> list[Answered]:
    """Send all requests at once; their answers in the same order."""

    async def run(client: httpx.AsyncClient) -> list[Answered]:
        return list(await asyncio.gather(*(ask(client, path, body) for path, body in jobs)))

    answers: list[Answered] = with_client(url, run, timeout_seconds=timeout_seconds)
    return answers


def with_client(
    url: str, work: Callable[[httpx.AsyncClient], Awaitable[Any]], *, timeout_seconds: float = 120
) -> Any:
    """Run `work` with a client that may have as many connections as it likes."""

    async def run() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=timeout_seconds, limits=limits
        ) as client:
            return await work(client)

    return asyncio.run(run())


def session_logs() -> list[Path]:
    """All log files of the Ray cluster of this process."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]


def replica_pids(app: str) -> list[int]:
    """The processes of an application's ingress replicas that are alive."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:{app}:"):
                pids.append(process.pid)
    return sorted(pids)
