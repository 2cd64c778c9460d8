"""What operators do to an application, on real Ray and over real HTTP: drain it, and hurt it.

Nothing is lost while there is time, and what is left then ends with a clear word.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from cluster.probe import Probe
from cluster.supervisor import existing_supervisors
from scheduler.messages import EngineState
from tests.support.asking import COMPLETIONS, ask_all, with_client
from tests.support.engines import FAKE_LOADER
from tests.support.events import Stream
from tests.support.faults import kill
from tests.support.models import make_stories_stand_in
from tests.support.served_model import ready_to_serve
from tests.support.serving import App, deployed

pytestmark = pytest.mark.timeout(func_only=True)

NUM_STREAMS = 32
DRAIN_SECONDS = 8.0
ADMIN_KEY = "admin-51d0"
REASON = "the server is being drained"
# What the fake model says depends on the seed.
LONG = {"prompt": [1, 2, 3], "seed": 1, "ignore_eos": True, "max_tokens": 1000}
SHORT = {**LONG, "max_tokens": 250}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts of a real model, and the fake one in the workers: they start in a moment, and how
    long their steps take is known."""
    folder = tmp_path_factory.mktemp("operations")
    real = ready_to_serve(make_stories_stand_in(folder / "stand-in"), folder)
    return real.rename(folder / "fake-10ms")


@pytest.fixture(scope="module")
def app(port: int, model: Path) -> Iterator[App]:
    """Of whose requests some have to wait in the queue."""
    with deployed(
        "operated",
        port,
        f"model.model={model}",
        "cache.num_blocks=2000",
        f"scheduler.max_num_seqs={NUM_STREAMS - 8}",
        f"server.drain_seconds={DRAIN_SECONDS}",
        "server.enable_chaos=true",
        environ={"PALIMPSEST_ADMIN_KEY": ADMIN_KEY},
        loader=FAKE_LOADER,
    ) as app:
        yield app


def palimpsest(*arguments: str) -> subprocess.CompletedProcess[str]:
    address = () if arguments[0] == "chaos" else ("--address", gcs_address())
    return subprocess.run(
        [sys.executable, "-c", "from cluster.cli import main; main()", *arguments, *address],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PALIMPSEST_ADMIN_KEY": ADMIN_KEY},
    )


def drained(app: App, seconds: float) -> int | None:
    found: int | None = ray.get(existing_supervisors()[app.name].drain.remote(REASON, seconds))
    return found


def undrain(app: App) -> None:
    ray.get(existing_supervisors()[app.name].undrain.remote())
    wait_state(app, "ready")


def chaos(
    app: App, folder: Path, *strikes: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What the command said, and its figures."""
    figures = folder / "figures.json"
    sizes = ("-n", "16", "--input-tokens", "20", "--output-tokens", "60", "--vocab-size", "32")
    done = palimpsest("chaos", "--url", app.url, *sizes, *strikes, "--json", str(figures))
    return done, json.loads(figures.read_text()) if figures.exists() else {}


def gcs_address() -> str:
    address: str = ray.get_runtime_context().gcs_address
    return address


@contextlib.contextmanager
def in_thread(work: Any) -> Iterator[list[Any]]:
    """Run `work` beside the body; its result is in the list after the body. Raises its error."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join()
    if errors:
        raise errors[0]


def wait_running(app: App, num_requests: int) -> None:
    deadline = time.monotonic() + 20
    while app.counters().open_requests < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_state(app: App, name: str) -> None:
    probe, deadline = Probe(app.url), time.monotonic() + 20
    while (state := probe.state()).name != name:
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


async def ended(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, Stream]:
    """The status, and the stream to its end, which may be an error."""
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
        return answer.status_code, Stream().read([line async for line in answer.aiter_lines()])


def test_a_drain_loses_nothing_and_can_be_undone(app: App) -> None:
    """Also with a scheduler that dies meanwhile, and with requests that still wait."""
    work = [(COMPLETIONS, {**SHORT, "stream": i % 2 == 0}) for i in range(NUM_STREAMS)]
    expected = ask_all(app.url, work)
    with in_thread(lambda: ask_all(app.url, work)) as answers:
        wait_running(app, NUM_STREAMS)
        with in_thread(lambda: drained(app, 60)) as num_ended:
            wait_state(app, "draining")
            kill(app.scheduler_pid())
            refused = httpx.post(app.url + COMPLETIONS, json=SHORT)
            assert refused.status_code == 503
            assert REASON in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            assert httpx.get(f"{app.url}/health").status_code == 200
    assert [answer.content for answer in answers[0]] == [answer.content for answer in expected]
    assert any("scheduler_lost" in answer.preemption.get("causes", {}) for answer in answers[0])
    assert num_ended == [0]
    again = palimpsest("drain", "--name", app.name)
    assert again.returncode == 0, again.stderr
    assert f"{app.name} is drained, no request was cut off." in again.stderr
    assert app.status().info.state is EngineState.DRAINING
    undone = palimpsest("drain", "--undo")
    assert f"{app.name} takes requests again." in undone.stderr
    wait_state(app, "ready")
    assert ask_all(app.url, work[:1])[0].content == expected[0].content


def test_what_is_left_after_its_time_ends_with_the_reason(app: App) -> None:
    async def run(client: httpx.AsyncClient) -> Any:
        whole = asyncio.create_task(client.post(COMPLETIONS, json=LONG))
        streams = [asyncio.create_task(ended(client, LONG)) for _ in range(NUM_STREAMS)]
        await asyncio.to_thread(wait_running, app, NUM_STREAMS + 1)
        num_ended = await asyncio.to_thread(drained, app, 1.0)
        return await asyncio.gather(*streams), await whole, num_ended

    streams, whole, num_ended = with_client(app.url, run)
    reason = f"The request was ended: {REASON}, and what ran had 1 s to end."
    assert {status for status, _ in streams} == {200}
    assert [stream.error and stream.error["message"] for _, stream in streams] == (
        [reason] * NUM_STREAMS
    )
    assert whole.status_code == 503
    assert whole.json()["error"]["message"] == reason
    assert num_ended == NUM_STREAMS + 1
    app.wait_idle()
    undrain(app)


def test_chaos_with_two_kills_is_told_by_pauses_alone(app: App, tmp_path: Path) -> None:
    pids = [app.worker_pids()[0], app.scheduler_pid()]
    done, report = chaos(app, tmp_path, "--kill", "worker:0@1", "--kill", "scheduler@2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (report["failed"], report["differing"], report["errors"]) == (0, 0, {})
    assert report["completed"] >= 16
    assert report["interrupted"] > 0
    for strike, process in zip(report["strikes"], ("worker 0", "scheduler"), strict=True):
        assert strike["strike"] == f"kill {process}"
        assert 0 <= strike["noticed_seconds"] <= strike["recovered_seconds"]
    assert report["longest_pause_seconds"] > report["undisturbed_longest_pause_seconds"]
    assert "kill worker 0: noticed after" in done.stderr
    assert not {app.worker_pids()[0], app.scheduler_pid()} & set(pids)
    app.wait_idle()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_chaos_reaches_all_processes(app: App, tmp_path: Path) -> None:
    """A worker that is stalled for a moment is a pause. With the supervisor the whole engine dies,
    with the replica its connections break."""
    done, report = chaos(app, tmp_path, "--stall", "worker:0@0.5+2")
    assert done.returncode == 0, done.stderr + done.stdout
    (stall,) = report["strikes"]
    assert stall["noticed_seconds"] is None
    assert stall["longest_pause_seconds"] > 1.5, report
    done, report = chaos(app, tmp_path, "--kill", "supervisor@0.5")
    assert done.returncode == 0, done.stderr + done.stdout
    (kill,) = report["strikes"]
    assert kill["recovered_seconds"] > kill["noticed_seconds"]
    done, report = chaos(app, tmp_path, "--kill", "replica:0@0.5")
    assert done.returncode == 1, done.stderr + done.stdout
    assert report["failed"] > 0
    assert report["differing"] == 0
    app.wait_ready()


@pytest.mark.full
def test_a_replica_that_serve_stops_ends_its_streams_in_time(app: App) -> None:
    """A redeploy that keeps the engine, and takes the replica away from streams that are long."""

    async def run(client: httpx.AsyncClient) -> Any:
        streams = [asyncio.create_task(ended(client, LONG)) for _ in range(4 * NUM_STREAMS)]
        await asyncio.to_thread(wait_running, app, 4 * NUM_STREAMS)
        await asyncio.to_thread(app.redeploy, server={"max_queue_seconds": 555.0})
        return await asyncio.gather(*streams)

    streams = with_client(app.url, run)
    cut = [stream for _, stream in streams if stream.error is not None]
    assert cut
    had = f"what ran had {DRAIN_SECONDS:g} s to end"
    for stream in cut:
        assert had in stream.error["message"]
    assert ask_all(app.url, [(COMPLETIONS, SHORT)])
    app.wait_idle()


@pytest.mark.full
def test_fewer_replicas_cut_no_stream(port: int, model: Path) -> None:
    settings = (f"model.model={model}", "cache.num_blocks=2000", "server.num_replicas=2")
    with deployed("shrinking", port, *settings, loader=FAKE_LOADER) as app:
        work = [(COMPLETIONS, {**SHORT, "stream": True})] * NUM_STREAMS
        (expected,) = ask_all(app.url, work[:1])
        with in_thread(lambda: ask_all(app.url, work)) as answers:
            wait_running(app, NUM_STREAMS)
            app.redeploy(server={"num_replicas": 1})
        (streams,) = answers
        assert [answer.content for answer in streams] == [expected.content] * NUM_STREAMS
        assert app.replica_states() == {"RUNNING": 1}
        app.wait_idle()


@pytest.mark.full
def test_the_end_of_an_application_ends_its_streams_in_time(port: int, model: Path) -> None:
    """By Serve's own means: `serve.delete`, which `serve shutdown` is for all applications."""
    settings = (f"model.model={model}", "cache.num_blocks=2000", "server.drain_seconds=2")
    with deployed("deleted", port, *settings, loader=FAKE_LOADER) as app:

        async def run(client: httpx.AsyncClient) -> Any:
            body = {**LONG, "max_tokens": 100}
            long = [asyncio.create_task(ended(client, LONG)) for _ in range(NUM_STREAMS)]
            await asyncio.to_thread(wait_running, app, NUM_STREAMS)
            short = [asyncio.create_task(ended(client, body)) for _ in range(4)]
            await asyncio.to_thread(wait_running, app, NUM_STREAMS + 4)
            await asyncio.to_thread(serve.delete, app.name)
            return await asyncio.gather(*short), await asyncio.gather(*long)

        short, long = with_client(app.url, run)
        assert all(stream.error is None for _, stream in short)
        assert any("had 2 s to end" in str(stream.error) for _, stream in long)
