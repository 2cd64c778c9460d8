"""The thread that hosts the core, over a link to a worker in this process."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from configs import load, resolve
from scheduler.core import SchedulerCore
from scheduler.errors import CacheInUseError, CoreCrashedError, LoopOverError
from scheduler.group import GroupSize
from scheduler.messages import (
    Heartbeat,
    SamplingParams,
    StepResult,
    SubmitRequest,
    TokenBatch,
    TokenDelta,
    WorkerFault,
    pack_token_ids,
)
from scheduler.step_loop import GroupLoss, Load, StepLoop
from tests.support.fake_model import run_solo
from tests.support.memory_link import MemoryLink

EPOCH = 3
NUM_BLOCKS = 16
BLOCK_SIZE = 16
PATIENCE_SECONDS = 10.0


@dataclass
class Listener:
    deltas: list[TokenDelta] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    joined: threading.Event = field(default_factory=threading.Event)
    losses: list[GroupLoss] = field(default_factory=list)
    crashed: threading.Event = field(default_factory=threading.Event)
    crashes: list[CoreCrashedError] = field(default_factory=list)

    def on_joined(self, epoch: int) -> None:
        self.joined.set()

    def on_news(self, batches: Mapping[str, TokenBatch], load: Load) -> None:
        self.loads.append(load)
        for batch in batches.values():
            self.deltas += batch.deltas

    def on_lost(self, loss: GroupLoss) -> None:
        self.losses.append(loss)

    def on_crash(self, crash: CoreCrashedError) -> None:
        self.crashes.append(crash)
        self.crashed.set()

    @property
    def finished(self) -> set[str]:
        return {delta.request_id for delta in self.deltas if delta.finish is not None}

    def token_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(t for d in self.deltas if d.request_id == request_id for t in d.token_ids)


@dataclass
class Host:
    loop: StepLoop
    link: MemoryLink
    listener: Listener

    def submit(self, request_id: str, max_tokens: int = 20) -> None:
        request = SubmitRequest(
            request_id=request_id,
            client_id="client",
            prompt_token_ids=pack_token_ids(PROMPT),
            sampling=SamplingParams(max_tokens, seed=1),
            arrival_seconds=0.0,
        )
        self.loop.call(lambda core, now: core.submit([request], now)).result(PATIENCE_SECONDS)


PROMPT = (1, 2, 3)


def size_of(num_ranks: int) -> GroupSize:
    return GroupSize(num_ranks, NUM_BLOCKS, max_model_len=200, vocab_size=32)


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    hosts = []

    def make(*, num_ranks: int = 1, hold: bool = False, deadline_seconds: float = 30.0) -> Host:
        config = resolve(load(environ={}).config, "cpu")
        core = SchedulerCore(
            scheduler=config.scheduler,
            cache=config.cache,
            num_blocks=NUM_BLOCKS,
            max_model_len=200,
            epoch=EPOCH,
        )
        link = MemoryLink(NUM_BLOCKS, BLOCK_SIZE, epoch=EPOCH, hold=hold)
        listener = Listener()
        loop = StepLoop(
            core,
            step_deadline_seconds=deadline_seconds,
            first_step_seconds=600,
            listener=listener,
        )
        loop.start()
        loop.begin(EPOCH, link, size_of(num_ranks))
        hosts.append(Host(loop, link, listener))
        return hosts[-1]

    yield make
    for host in hosts:
        host.loop.stop()
        assert host.link.is_closed


def test_requests_run_to_their_end(make_host: Callable[..., Host]) -> None:
    host = make_host()
    for name in ("a", "b"):
        host.submit(name)
    eventually(lambda: len([d for d in host.listener.deltas if d.finish]) == 2)
    expected = run_solo(PROMPT, SamplingParams(20, seed=1), 200).token_ids
    assert host.listener.token_ids("a") == host.listener.token_ids("b") == expected
    eventually(lambda: host.listener.loads[-1].running_requests == 0)
    assert [plan.epoch for plan in host.link.plans] == [EPOCH] * len(host.link.plans)
    assert [plan.step_id for plan in host.link.plans] == list(range(len(host.link.plans)))
    eventually(lambda: host.loop.timings)
    assert host.loop.timings[-1].gap_seconds == 0.0001


def test_no_plan_is_made_before_every_rank_is_there(make_host: Callable[..., Host]) -> None:
    host = make_host(num_ranks=3)
    host.submit("a")
    host.link.say(Heartbeat(EPOCH, 2, 0))
    host.link.say(Heartbeat(EPOCH - 1, 1, 0))  # of an epoch that is over
    host.link.say(Heartbeat(EPOCH, 2, 0))
    time.sleep(0.05)
    assert not host.link.plans
    assert not host.listener.joined.is_set()
    host.link.say(Heartbeat(EPOCH, 1, 0))
    assert host.listener.joined.wait(PATIENCE_SECONDS)
    eventually(lambda: host.listener.deltas and host.listener.deltas[-1].finish)


def test_look_ahead_publishes_the_next_plan_before_an_answer(
    make_host: Callable[..., Host],
) -> None:
    host = make_host(hold=True)
    host.submit("a")
    eventually(lambda: host.link.num_held == 2)
    time.sleep(0.02)
    assert len(host.link.plans) == 2
    host.link.release()
    eventually(lambda: len(host.link.plans) == 3)


@pytest.mark.parametrize("how", ["fault", "link", "told", "deadline"])
def test_after_a_loss_all_goes_on_with_the_next_group(
    make_host: Callable[..., Host], how: str
) -> None:
    host = make_host(hold=True, deadline_seconds=0.2 if how == "deadline" else 30.0)
    host.submit("running")
    eventually(lambda: host.link.num_held == 2)
    host.link.release()
    eventually(lambda: len(host.link.plans) == 3)
    host.submit("waiting")
    match how:
        case "fault":
            host.link.say(WorkerFault(EPOCH - 1, 1, 0, "OldError", "of an epoch that is over"))
            host.link.say(WorkerFault(EPOCH, 1, 0, "MirrorDriftError", "they differ"))
            words = "worker 0 failed in step 1: MirrorDriftError: they differ"
        case "link":
            host.link.is_broken = True
            host.link.release()
            words = "worker 0 cannot be reached"
        case "told":
            host.loop.lose(EPOCH - 1, "that was long ago")
            host.loop.lose(EPOCH, "worker 0 is lost: its process died")
            words = "worker 0 is lost: its process died"
        case _:
            words = "have not answered a step"
    eventually(lambda: host.listener.losses)
    (loss,) = host.listener.losses
    assert words in loss.reason
    assert (loss.epoch, loss.num_steps) == (EPOCH, 2 if how == "link" else 1)
    eventually(lambda: host.link.is_closed)
    host.submit("meanwhile")
    assert host.listener.loads[-1].running_requests == 0
    host.link.say(StepResult(EPOCH, 2, ()))  # of a link that nobody listens to
    host.link = MemoryLink(NUM_BLOCKS, BLOCK_SIZE, epoch=EPOCH + 3)
    host.loop.begin(EPOCH + 3, host.link, size_of(num_ranks=1))
    expected = run_solo(PROMPT, SamplingParams(20, seed=1), 200).token_ids
    names = {"running", "waiting", "meanwhile"}
    eventually(lambda: host.listener.finished == names)
    assert {host.listener.token_ids(name) for name in names} == {expected}
    assert len(host.listener.losses) == 1
    assert not host.listener.crashed.is_set()


def test_a_loop_that_stands_still_loses_no_group(make_host: Callable[..., Host]) -> None:
    host = make_host(hold=True, deadline_seconds=1.0)
    host.submit("a")
    eventually(lambda: host.link.num_held)
    host.link.release()
    eventually(lambda: host.listener.token_ids("a"))

    def stand_still(core: SchedulerCore, now: float) -> None:
        host.link.hold = False
        host.link.release(host.link.num_held)
        time.sleep(1.2)

    host.loop.call(stand_still).result(PATIENCE_SECONDS)
    eventually(lambda: "a" in host.listener.finished)
    assert not host.listener.losses


def test_a_result_that_nobody_asked_for_ends_the_process(
    make_host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host(hold=True)
    host.submit("private-name")
    eventually(lambda: host.link.num_held == 2)
    host.link.say(StepResult(EPOCH, 7, ()))
    assert host.listener.crashed.wait(PATIENCE_SECONDS)
    assert not host.listener.losses
    assert "result of step 7" in caplog.text
    assert "('result', 3, 7)" in caplog.text, "the last events are told"
    assert host.listener.crashes[0].request_ids == ()


def test_a_mistake_of_a_caller_is_its_own(make_host: Callable[..., Host]) -> None:
    host = make_host(hold=True)
    host.submit("a")
    eventually(lambda: host.link.num_held == 2)
    with pytest.raises(CacheInUseError):
        host.loop.call(lambda core, now: core.reset_prefix_cache()).result(PATIENCE_SECONDS)
    host.submit("b")
    assert not host.listener.crashed.is_set()


def test_calls_after_the_end_fail_and_do_not_hang(make_host: Callable[..., Host]) -> None:
    host = make_host()
    host.loop.stop()
    with pytest.raises(LoopOverError):
        host.loop.call(lambda core, now: None).result(PATIENCE_SECONDS)


def test_the_link_of_a_group_that_comes_too_late_is_closed(make_host: Callable[..., Host]) -> None:
    host = make_host()
    host.loop.stop()
    late = MemoryLink(NUM_BLOCKS, BLOCK_SIZE, epoch=EPOCH + 1)
    host.loop.begin(EPOCH + 1, late, size_of(1))
    assert late.is_closed


def test_calls_from_many_threads_all_run(make_host: Callable[..., Host]) -> None:
    host = make_host()
    counted = []

    def call() -> None:
        for _ in range(200):
            host.loop.call(lambda core, now: counted.append(now)).result(PATIENCE_SECONDS)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted) == 1600
    assert counted == sorted(counted)
