"""Whatever dies, over HTTP and with a real model: no answer is lost, and no text changes."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray

from cluster.probe import Probe
from cluster.supervisor import existing_supervisors
from tests.support import faulty_rank
from tests.support.asking import COMPLETIONS
from tests.support.events import Stream
from tests.support.faults import (
    RECOVERY_SECONDS,
    Load,
    is_alive,
    kill,
    pids_of,
    replica_pids,
    undisturbed,
    wait_dead,
    wait_recovered,
    wait_steady,
)
from tests.support.http_jobs import jobs, num_sequences
from tests.support.serving import App, deployed

pytestmark = pytest.mark.timeout(240, func_only=True)

NUM_RANKS = 4
MAX_GROWTH = 1.1
STEP_DEADLINE_SECONDS = 3
JOBS = jobs(26, seed=5)
NUM_STREAMS = num_sequences(JOBS)
FEW = 8
WORKER, SCHEDULER = "ray::WorkerProcess", "ray::SchedulerProcess"
SETTINGS = (
    "model.dtype=float32",
    "parallel.tensor_parallel_size=2",
    "parallel.pipeline_parallel_size=2",
    "cache.num_blocks=1500",
    f"server.step_deadline_seconds={STEP_DEADLINE_SECONDS}",
)


@pytest.fixture(scope="module")
def the_app(port: int, model: Path) -> Iterator[App]:
    settings = (f"model.model={model}", *SETTINGS)
    with deployed("faults", port, *settings, loader=faulty_rank.LOADER) as app:
        yield app


@pytest.fixture(scope="module")
def undisturbed_load(the_app: App) -> Load:
    assert NUM_STREAMS >= 32
    return undisturbed(the_app, JOBS)


@pytest.fixture
def app(the_app: App) -> Iterator[App]:
    """Which must be idle and hold nothing at the end of the test."""
    yield the_app
    the_app.wait_idle()


@pytest.fixture
def load(app: App, undisturbed_load: Load) -> Load:
    return undisturbed_load.of_first(FEW)


@pytest.fixture
def full_load(app: App, undisturbed_load: Load) -> Load:
    return undisturbed_load.of_first(len(JOBS))


def recoveries_of(app: App) -> int:
    return app.status().num_recoveries


def test_kills_at_random_moments(app: App, full_load: Load) -> None:
    """Every other one may hit while the way back from the one before is not done."""
    rng = random.Random(8)
    pids, scheduler_pid, before = app.worker_pids(), app.scheduler_pid(), recoveries_of(app)
    with full_load.running():
        for _ in range(4):
            epoch = app.status().info.epoch
            time.sleep(4 * rng.random())
            full_load.wait_busy()
            kill_one(WORKER, rng)
            time.sleep(4 * rng.random())
            kill_one(WORKER, rng)
            wait_steady(app, epoch)
    assert full_load.causes["worker_lost"] >= NUM_STREAMS
    assert set(full_load.causes) == {"worker_lost"}
    assert not set(pids) <= set(app.worker_pids())
    assert app.scheduler_pid() == scheduler_pid
    assert recoveries_of(app) >= before + 4
    assert app.counters().preemptions["worker_lost"] >= full_load.causes["worker_lost"]


def kill_one(title: str, rng: random.Random) -> None:
    """One of the processes that are called so; it may be on its way into a group, or out."""
    while not (pids := sorted(pids_of(title))):
        time.sleep(0.01)
    kill(rng.choice(pids))


def test_probes_and_new_requests_while_it_recovers(app: App, load: Load) -> None:
    before = recoveries_of(app)
    with httpx.Client(base_url=app.url, timeout=60) as client, load.running():
        kill(app.worker_pids()[1])
        while (ready := client.get("/ready")).status_code == 200:
            time.sleep(0.01)
        assert ready.status_code == 503
        assert ready.json()["status"] == "recovering"
        assert "worker" in ready.json()["reason"]
        assert client.get("/health").status_code == 200
        answer = client.post(COMPLETIONS, json={"prompt": "The cat", "max_tokens": 3})
        assert answer.status_code == 200
        assert recoveries_of(app) == before + 1, "it waited for the next group"
    assert client.is_closed


def test_a_model_that_fails_takes_its_process_along_and_no_other(
    app: App, model: Path, load: Load
) -> None:
    pids, before = app.worker_pids(), recoveries_of(app)
    with load.running():
        time.sleep(0.5)
        faulty_rank.ask(model, 3, "raise")
        recovery = wait_recovered(app, before + 1)
    assert recovery.replaced == ("worker 3",)
    assert "the test wants this model to fail" in recovery.reason
    assert app.worker_pids()[:3] == pids[:3]
    assert load.causes["worker_lost"]


def test_a_process_that_stops_is_replaced_and_ends_when_it_wakes(app: App, load: Load) -> None:
    pids, before = app.worker_pids(), recoveries_of(app)
    zombie = pids[0]
    with load.running():
        time.sleep(0.5)
        os.kill(zombie, signal.SIGSTOP)
        recovery = wait_recovered(app, before + 1)
        assert "worker 0" in recovery.replaced
        if is_alive(zombie):
            os.kill(zombie, signal.SIGCONT)
        wait_dead([zombie])
        load.wait_for_answers()
    assert recoveries_of(app) == before + 1, "nobody was hurt by what it did when it woke"


@pytest.mark.full
def test_a_process_that_stops_on_its_way_into_a_group(app: App, model: Path, load: Load) -> None:
    before, pids = recoveries_of(app), app.worker_pids()
    with load.running():
        time.sleep(0.5)
        faulty_rank.ask(model, 1, "stop")
        kill(pids[2])
        recovery = wait_recovered(app, before + 1)
    assert "worker 1" in recovery.replaced
    wait_dead([pids[1]])


def test_a_rank_that_hangs_in_its_step(app: App, model: Path, load: Load) -> None:
    before = recoveries_of(app)
    with load.running():
        time.sleep(0.5)
        asked = faulty_rank.ask(model, 2, "hang")
        recovery = wait_recovered(app, before + 1)
    assert not asked.exists()
    assert "worker 2" in recovery.replaced
    assert "have not answered a step" in recovery.reason
    assert load.num_comments, "it stood still for longer than a comment is late"


def test_a_scheduler_that_dies_again_and_again(app: App, load: Load) -> None:
    pids, before = app.worker_pids(), recoveries_of(app)
    with load.running():
        for number in range(2):
            time.sleep(0.3 + 0.4 * number)
            kill(app.scheduler_pid())
            recovery = wait_recovered(app, before + number + 1)
            assert recovery.replaced == ("scheduler",)
    assert load.causes["scheduler_lost"] >= 2
    assert app.worker_pids() == pids, "the workers keep their weights"


@pytest.mark.full
def test_a_scheduler_that_stops(app: App, load: Load) -> None:
    before, zombie = recoveries_of(app), app.scheduler_pid()
    with load.running():
        time.sleep(0.5)
        os.kill(zombie, signal.SIGSTOP)
        recovery = wait_recovered(app, before + 1)
        assert recovery.replaced == ("scheduler",)
        assert "has not answered" in recovery.reason
        if is_alive(zombie):
            os.kill(zombie, signal.SIGCONT)
        wait_dead([zombie])
    assert recoveries_of(app) == before + 1


@pytest.mark.full
def test_a_scheduler_that_stops_on_the_way_into_a_group(app: App, load: Load) -> None:
    before, zombie = recoveries_of(app), app.scheduler_pid()
    with load.running():
        time.sleep(0.5)
        kill(app.worker_pids()[0])
        time.sleep(1)  # the next one imports torch
        os.kill(zombie, signal.SIGSTOP)
        recovery = wait_recovered(app, before + 1)
        assert recovery.replaced == ("scheduler",)
        if is_alive(zombie):
            os.kill(zombie, signal.SIGCONT)
        wait_dead([zombie])
    assert recoveries_of(app) == before + 1


@pytest.mark.parametrize(
    "num_faults", [20, pytest.param(300, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_faults_of_all_kinds(app: App, model: Path, full_load: Load, num_faults: int) -> None:
    """Two to four at a time, within seconds: half of them kill a worker, the others the
    scheduler, or a model fails."""
    rng = random.Random(num_faults)
    num_left = num_faults
    early: dict[str, float] = {}
    with full_load.running():
        while num_left:
            epoch = app.status().info.epoch
            time.sleep(rng.random())
            for _ in range(min(num_left, rng.randint(2, 4))):
                time.sleep(rng.random() / 2)
                match rng.choice(("worker", "worker", "scheduler", "model")):
                    case "worker":
                        kill_one(WORKER, rng)
                    case "scheduler":
                        kill_one(SCHEDULER, rng)
                    case "model":
                        faulty_rank.ask(model, rng.randrange(NUM_RANKS), "raise")
                num_left -= 1
            wait_steady(app, epoch)
            if not early and num_left < num_faults * 3 // 4:
                early = resources_of(app)
    assert set(full_load.causes) == {"worker_lost", "scheduler_lost"}
    app.wait_idle()
    if num_faults > 100:
        late = resources_of(app)
        for what, amount in early.items():
            assert late[what] <= amount * MAX_GROWTH + 8, (what, early, late)


def resources_of(app: App) -> dict[str, float]:
    """What the processes that no fault replaces hold: of the supervisor and of the replica, and
    how many processes there are."""
    held: dict[str, float] = {"processes": len(psutil.Process().children(recursive=True))}
    pids = {"supervisor": asyncio.run(supervisor_pid(app.name)), "replica": replica_pids(app)[0]}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        held[f"descriptors of the {name}"] = process.num_fds()
        held[f"MiB of the {name}"] = process.memory_info().rss / 2**20
    held["shared memory"] = len(list(Path("/dev/shm").iterdir()))
    return held


def test_an_ingress_replica_that_dies_takes_its_requests_along_and_is_replaced(app: App) -> None:
    body = {"prompt": "The cat", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    (replica,) = replica_pids(app)
    with httpx.Client(base_url=app.url, timeout=30) as client:
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            kill(replica)
            with pytest.raises((httpx.TransportError, AssertionError)):
                Stream().read(["", *lines])
        app.wait_idle(timeout_seconds=5)
        deadline = time.monotonic() + 30
        while not (state := Probe(app.url).state()).is_ready:
            assert time.monotonic() < deadline, state
            time.sleep(0.1)
        answer = client.post(COMPLETIONS, json={"prompt": "The cat", "max_tokens": 3})
        assert answer.status_code == 200


@pytest.mark.full
def test_what_ray_serve_loses(app: App, load: Load) -> None:
    """The controller: nobody notices. The proxy: connections break, and soon another listens."""
    with load.running():
        kill(pids_of("ray::ServeController")[0])
        load.wait_for_answers(len(load.jobs))
    assert not load.causes
    kill(pids_of("ray::ProxyActor")[0])
    deadline = time.monotonic() + 30
    while not (state := Probe(app.url).state()).is_ready:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    load.run_once()


def test_a_supervisor_that_dies_takes_the_engine_along_and_no_request(app: App, load: Load) -> None:
    """Also where a process of the next engine dies before that is ready."""
    pids = [*app.worker_pids(), app.scheduler_pid()]
    with load.running():
        load.wait_busy()
        old = asyncio.run(supervisor_pid(app.name))
        kill(old)
        while not (starting := set(pids_of(WORKER)) - set(pids)):
            time.sleep(0.01)
        kill(starting.pop())
        wait_for_another_supervisor(app, old)
        load.wait_for_answers()
    assert load.causes["scheduler_lost"]
    assert not set(pids) & {*app.worker_pids(), app.scheduler_pid()}
    wait_dead(pids)


def wait_for_another_supervisor(app: App, old: int) -> None:
    """Returns when it has an engine that is ready."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        # The dead one is listed for a moment, and then there is none.
        with contextlib.suppress(ray.exceptions.RayActorError, KeyError):
            if asyncio.run(supervisor_pid(app.name)) != old and app.status().info.is_ready:
                return
        time.sleep(0.1)
    raise AssertionError(f"no engine is ready after {RECOVERY_SECONDS} s")


async def supervisor_pid(app: str) -> int:
    pid = await existing_supervisors()[app].process_id.remote()
    assert isinstance(pid, int)
    return pid
