"""Applications on Ray Serve, for tests that talk to them over HTTP."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.app import application
from cluster.engine_spec import EngineSpec
from cluster.probe import Probe
from cluster.supervisor import existing_supervisors
from cluster.supervisor_view import AppStatus
from configs import Config, load
from scheduler.status import Counters
from tests.support.engines import status_of, stop

HOST = "127.0.0.1"
READY_SECONDS = 180.0
ADMIN_KEY = "admin-key"
ORIGIN = "https://friend.example"
"""Of a web page that may ask."""


_PORTS = range(30_000, 32_768)
"""Below those that the kernel gives to whoever takes any, as Ray's many processes do."""
_ports_given: set[int] = set()


def free_port() -> int:
    """A port that stays free until it is used, which may be a minute later."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if port not in _ports_given:
                _ports_given.add(port)
                return port


@dataclass(slots=True)
class App:
    """A deployed application that is ready."""

    name: str
    url: str
    config: Config
    spec: EngineSpec

    def redeploy(self, **changes: Mapping[str, Any]) -> None:
        """Deploy it again with other settings, by section. Those of `server` leave the engine as
        it is."""
        sections = {
            name: getattr(self.config, name).model_copy(update=dict(section))
            for name, section in changes.items()
        }
        self.config = self.config.model_copy(update=sections)
        self.spec = EngineSpec.of(self.config, loader=self.spec.loader)
        self.deploy()

    def deploy(self) -> None:
        built = application(self.config, self.spec)
        serve.run(built, name=self.name, route_prefix=f"/{self.name}")

    def replica_states(self) -> dict[str, int]:
        """How many ingress replicas are in which state, as Serve calls it."""
        (ingress,) = serve.status().applications[self.name].deployments.values()
        return {str(state): count for state, count in ingress.replica_states.items()}

    def wait_ready(self) -> None:
        """Raises AssertionError when the engine fails, or takes too long."""
        probe, deadline = Probe(self.url), time.monotonic() + READY_SECONDS
        while not (state := probe.state()).is_ready:
            assert not state.has_failed, state.reason
            assert time.monotonic() < deadline, state
            time.sleep(0.1)

    def wait_idle(self, timeout_seconds: float = 5.0) -> None:
        """Returns when the engine has nothing left; raises AssertionError if that takes longer."""
        deadline = time.monotonic() + timeout_seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"still there after {timeout_seconds} s: {left}"

    def status(self) -> AppStatus:
        return asyncio.run(status_of(self.name))

    def counters(self) -> Counters:
        scheduler = self.status().scheduler
        assert scheduler is not None
        assert scheduler.counters is not None
        return scheduler.counters

    def worker_pids(self) -> list[int]:
        return [place.process_id for place in self.status().places]

    def scheduler_pid(self) -> int:
        place = self.status().scheduler_place
        assert place is not None
        return place.process_id

    def _left(self) -> dict[str, int]:
        counters = self.counters()
        counts = {
            "open requests": counters.open_requests,
            "held blocks": counters.held_blocks,
            "steps in flight": counters.steps_in_flight,
        }
        return {what: count for what, count in counts.items() if count}


@contextlib.contextmanager
def deployed(
    name: str,
    port: int,
    *overrides: str,
    environ: Mapping[str, str] | None = None,
    waits: bool = True,
    **engine: Any,
) -> Iterator[App]:
    """An application at `/name`; Serve must listen on `port`. Its engine ends with it.

    `waits`: until it is ready. `engine` goes to `EngineSpec.of`.
    """
    config = load(overrides=overrides, environ=environ or {}).config
    spec = EngineSpec.of(config, **engine)
    app = App(name, f"http://{HOST}:{port}/{name}", config, spec)
    try:
        app.deploy()
        if waits:
            app.wait_ready()
        yield app
    finally:
        serve.delete(name)
        asyncio.run(stop(name))


@contextlib.contextmanager
def serve_on(port: int) -> Iterator[None]:
    """Ray Serve on the Ray cluster of this process, listening on its first node.

    A cluster has one Serve, with one port: integration tests have it as the fixture `port`.
    """
    assert not serve.status().proxies, "Ray Serve runs already: take the fixture `port`"
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
    try:
        yield
    finally:
        assert not existing_supervisors(), "an engine is left"
        serve.shutdown()


def session_logs() -> list[Path]:
    """All log files of the Ray cluster of this process."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]
