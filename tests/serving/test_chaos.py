"""`palimpsest chaos` against a real HTTP server whose processes are made up: who is refused, and
with which words."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.asgi import KeyDigests
from cluster.chaos_schedule import Action
from cluster.cli import main
from cluster.errors import EngineUnavailableError
from cluster.http_settings import HttpSettings
from cluster.operations import Struck, UnknownProcessError
from cluster.supervisor_view import AppStatus, Place
from scheduler.messages import EngineInfo, EngineState
from tests.support.http_server import HttpServer, http_server

ADMIN = {"authorization": "Bearer admin-key"}
KILL = {"action": "kill", "process": "worker 0"}


class MadeUp:
    """An application with one worker, of which nothing dies."""

    def __init__(self) -> None:
        self.strikes: list[tuple[str, Action, float]] = []
        self.is_there = True

    async def status(self) -> AppStatus:
        if not self.is_there:
            raise EngineUnavailableError("the supervisor is gone")
        place = Place("node", "127.0.0.1", 1)
        return AppStatus(
            app="made-up",
            model="parrot",
            info=EngineInfo(EngineState.READY),
            shape=None,
            num_replicas=1,
            scheduler_place=place,
            places=(place,),
            supervisor_place=place,
            replica_places=(),
            scheduler=None,
            num_restarts=0,
            num_recoveries=0,
            recoveries=(),
        )

    async def strike(self, process: str, action: Action, seconds: float) -> Struck:
        processes = (await self.status()).processes
        if process not in processes:
            raise UnknownProcessError(f"{process} is unknown")
        self.strikes.append((process, action, seconds))
        return Struck(1, 0.0)


@pytest.fixture(scope="module")
def made_up() -> MadeUp:
    return MadeUp()


@pytest.fixture(scope="module")
def enabled(made_up: MadeUp) -> Iterator[HttpServer]:
    settings = HttpSettings(admin_key=KeyDigests.of(["admin-key"]))
    with http_server(settings=settings, operations=made_up) as server:
        yield server


def run(monkeypatch: pytest.MonkeyPatch, url: str, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["palimpsest", "chaos", "--url", url, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_server_that_does_not_allow_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made_up: MadeUp
) -> None:
    """Without the setting, and without an admin key."""
    only_key = HttpSettings(admin_key=KeyDigests.of(["admin-key"]))
    monkeypatch.setenv("PALIMPSEST_ADMIN_KEY", "admin-key")
    for settings, operations in ((only_key, None), (HttpSettings(), made_up)):
        with http_server(settings=settings, operations=operations) as server:
            assert httpx.post(f"{server.url}/chaos", json=KILL, headers=ADMIN).status_code == 404
            assert run(monkeypatch, server.url, "--kill", "worker:0@0") == 2
            assert "start it with server.enable_chaos true" in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, "another-key"])
def test_without_the_key_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    enabled: HttpServer,
    made_up: MadeUp,
    key: str | None,
) -> None:
    monkeypatch.delenv("PALIMPSEST_ADMIN_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("PALIMPSEST_ADMIN_KEY", key)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for answer in (
        httpx.post(f"{enabled.url}/chaos", json=KILL, headers=headers),
        httpx.get(f"{enabled.url}/chaos", headers=headers),
    ):
        assert answer.status_code == 401
    assert run(monkeypatch, enabled.url, "--kill", "worker:0@0") == 2
    assert "The admin key is missing or wrong" in capsys.readouterr().err
    assert not made_up.strikes


def test_an_unknown_rank_is_refused_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    enabled: HttpServer,
    made_up: MadeUp,
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    key.write_text("admin-key\n")
    arguments = ("--admin-key-file", str(key), "--kill", "worker:0@0", "--kill", "worker:7@0")
    assert run(monkeypatch, enabled.url, *arguments) == 2
    assert (
        "There is no worker 7 to kill: the server has worker 0, scheduler, supervisor."
        in capsys.readouterr().err
    )
    assert not made_up.strikes
    answer = httpx.post(f"{enabled.url}/chaos", json={**KILL, "process": "worker 7"}, headers=ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "worker 7 is unknown."


@pytest.mark.parametrize(
    "wrong", [{"action": "maim"}, {"seconds": -1}, {"process": 5}, {"seconds": 1e9}, {"pid": 1}]
)
def test_mistakes(enabled: HttpServer, made_up: MadeUp, wrong: dict[str, object]) -> None:
    answer = httpx.post(f"{enabled.url}/chaos", json={**KILL, **wrong}, headers=ADMIN)
    assert answer.status_code == 400
    assert not made_up.strikes


def test_while_the_supervisor_is_gone(enabled: HttpServer, made_up: MadeUp) -> None:
    made_up.is_there = False
    answer = httpx.get(f"{enabled.url}/chaos", headers=ADMIN)
    made_up.is_there = True
    assert answer.status_code == 503
    assert "the supervisor is gone" in answer.json()["error"]["message"]


def test_a_strike_that_nobody_feels(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    enabled: HttpServer,
    made_up: MadeUp,
) -> None:
    monkeypatch.setenv("PALIMPSEST_ADMIN_KEY", "admin-key")
    monkeypatch.setattr("cluster.chaos_run.QUIET_SECONDS", 0.3)
    sizes = ("-n", "4", "-c", "2", "--input-tokens", "8", "--output-tokens", "8")
    arguments = (*sizes, "--vocab-size", "256", "--stall", "worker:0@0.2+0.1")
    assert run(monkeypatch, enabled.url, *arguments) == 0
    told = capsys.readouterr()
    assert "stall worker 0 for 0.1 s: nobody noticed" in told.err
    assert made_up.strikes == [("worker 0", "stall", 0.1)]
    assert "texts that differ" in told.out
    made_up.strikes.clear()
