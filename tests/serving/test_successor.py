"""Requests outlive their workers, and their scheduler, at whatever point that dies."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import pytest

import scheduler.actor
import scheduler.clients
from cluster.engine_client import EngineClient
from cluster.errors import EngineLostError, EngineReplacedError, EngineUnavailableError
from scheduler.actor import SchedulerActor
from scheduler.messages import (
    Accepted,
    EndReason,
    EndRequest,
    EngineState,
    FinishReason,
    InterruptionCause,
    PollAnswer,
    SamplingParams,
    SubmitAnswer,
    SubmitRequest,
    SubmitRequests,
    TokenLogprobs,
    Usage,
    WorkerFault,
    encode,
    pack_token_ids,
)
from tests.support.hosted_engine import (
    EPOCH,
    EXPECTED,
    PROMPT,
    SIZE,
    Calls,
    Engine,
    engine,
    eventually,
    read,
    runs,
    slow_engine,
)


async def go_on(it: Engine, reading: "asyncio.Task[Any]") -> None:
    """Let the workers answer until `reading` is done."""
    while not reading.done():
        await eventually(lambda: it.link.num_held or reading.done())
        it.link.release(it.link.num_held)


@runs
async def test_requests_outlive_the_loss_of_the_workers_and_others_wait_meanwhile() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        reading = asyncio.create_task(read(it.client, "a"))
        for _ in range(4):
            await eventually(lambda: it.link.num_held)
            it.link.release()
        lost = asyncio.create_task(it.actor.wait_lost(EPOCH))
        it.link.say(WorkerFault(EPOCH, 0, 0, "MirrorDriftError", "they differ"))
        loss = await lost
        assert (loss.epoch, loss.num_steps) == (EPOCH, 4)
        assert "they differ" in loss.reason
        assert await it.actor.lose(EPOCH, "somebody else knows too") == loss
        await eventually(lambda: it.client.info().state is EngineState.RECOVERING)
        assert "they differ" in it.client.info().reason
        assert it.client.info().max_model_len == SIZE.max_model_len
        assert isinstance(await it.client.submit([it.request("b")]), Accepted)
        await it.next_group(EPOCH + 2)
        await eventually(lambda: it.client.info().is_ready)
        other = asyncio.create_task(read(it.client, "b"))
        for task in (reading, other):
            await go_on(it, task)
            assert task.result() == (EXPECTED, FinishReason.LENGTH)
        counters = (await it.actor.status()).counters
        assert counters is not None
        assert counters.preemptions == {"worker_lost": 1}


@runs
async def test_an_engine_that_is_given_up_fails_its_requests() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        await it.actor.give_up("there is no hope")
        last = [delta async for delta in it.client.stream("a")][-1]
        assert last.error == "there is no hope"
        await eventually(lambda: it.client.info().state is EngineState.FAILED)
        with pytest.raises(EngineUnavailableError, match="no hope"):
            await it.client.submit([it.request("b")])


@runs
async def test_recovering_for_too_long_is_refused_with_both_times() -> None:
    async with engine(hold=True) as it:
        impatient = EngineClient(it.calls, max_recovery_seconds=0.0)
        impatient.start()
        await impatient.wait_ready(10)
        await it.actor.lose(EPOCH, "a test")
        await eventually(lambda: impatient.info().state is EngineState.RECOVERING)
        await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailableError, match=r"server\.max_recovery_seconds.*a test"):
            await impatient.submit([it.request("b")])
        await impatient.close()


@runs
async def test_a_successor_is_brought_what_the_lost_scheduler_had() -> None:
    """One request in the middle of its output, one that waits, one whose answer was lost, and one
    whose stop was told to the dead."""
    async with engine("scheduler.max_num_seqs=3", hold=True) as it:
        names = ("running", "stopped", "third", "waiting")
        for name in names:
            await it.client.submit([it.request(name)])
        readings = {name: asyncio.create_task(read(it.client, name)) for name in names}
        for _ in range(5):
            await eventually(lambda: it.link.num_held)
            it.link.release()
        await eventually(lambda: it.client.info().waiting_requests == 1)
        it.calls.is_cut = True
        await it.client.end(EndRequest("stopped", EndReason.STOP, 2))
        late = asyncio.create_task(it.client.submit([it.request("late")]))
        await it.actor.give_up("for the pending poll to return")
        await eventually(lambda: it.client.info().state is EngineState.RECOVERING)
        assert not late.done()
        async with engine("scheduler.max_num_seqs=3", awaited=(it.client.client_id,)) as successor:
            it.calls.actor, it.calls.is_cut = successor.actor, False
            assert isinstance(await late, Accepted)
            readings["late"] = asyncio.create_task(read(it.client, "late"))
            answers = dict(zip(readings, await asyncio.gather(*readings.values()), strict=True))
            assert answers.pop("stopped")[1] is FinishReason.STOP
            assert set(answers.values()) == {(EXPECTED, FinishReason.LENGTH)}
            counters = (await successor.actor.status()).counters
            assert counters is not None
            assert counters.preemptions == {"scheduler_lost": 4}
            assert it.client.num_streams == 0


@runs
async def test_a_new_request_waits_until_known_replicas_have_resumed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.actor, "RESUME_SECONDS", 30.0)
        async with engine(awaited=("elsewhere",)) as it:
            submitting = asyncio.create_task(it.client.submit([it.request("a")]))
            await asyncio.sleep(0.05)
            assert not submitting.done()
            await it.actor.resume("elsewhere", encode(SubmitRequests(())))
            assert isinstance(await submitting, Accepted)
        patch.setattr(scheduler.actor, "RESUME_SECONDS", 0.05)
        async with engine(awaited=("died with it",)) as it:
            assert isinstance(await it.client.submit([it.request("a")]), Accepted)


@runs
async def test_a_drain_waits_for_what_a_known_replica_may_still_bring() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.actor, "RESUME_SECONDS", 0.05)
        async with engine(awaited=("elsewhere",)) as it:
            await it.client.submit([it.request("a")])
            assert await read(it.client, "a") == (EXPECTED, FinishReason.LENGTH)
            await it.actor.set_drain("it is drained")
            draining = asyncio.create_task(it.actor.wait_drained())
            await asyncio.sleep(0.2)
            assert not draining.done()
            await it.actor.resume("elsewhere", encode(SubmitRequests(())))
            await asyncio.wait_for(draining, 10)


# -- one request, and a scheduler that dies at every point of its life -------------------------

Point: TypeAlias = Literal["submit", "mailbox", "admission", "token", "last token", "end"]

SAMPLINGS = (
    SamplingParams(20, seed=1),
    SamplingParams(20, seed=2, logprobs=2, prompt_logprobs=1),
    SamplingParams(20, seed=3, min_tokens=12, stop_token_ids=tuple(range(0, 32, 2))),
    SamplingParams(20, seed=4, presence_penalty=0.5, frequency_penalty=0.5, logprobs=0),
)
STOP_AFTER = 7
"""The last of the requests is stopped from outside, as by a stop text, with this many tokens."""


class MortalCalls(Calls):
    """Die once, at `point`."""

    def __init__(self, actor: SchedulerActor, point: Point) -> None:
        super().__init__(actor)
        self.point: Point | None = point
        self.num_tokens: Counter[str] = Counter()
        self.background: list[asyncio.Task[Any]] = []

    def die(self, *points: Point) -> None:
        if self.point in points:
            self.point, self.is_cut = None, True
            raise EngineLostError("the scheduler died")

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        self._check()
        self.die("submit")
        if self.point == "mailbox":
            data = encode(SubmitRequests(tuple(messages)))
            self.background.append(asyncio.create_task(self.actor.submit(data)))
            await asyncio.sleep(0)
            self.die("mailbox")
        answer = await super().submit(messages)
        self.die("admission")
        return answer

    async def end(self, message: EndRequest) -> None:
        await super().end(message)
        self.die("end")

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        answer = await super().poll(client_id, last_batch)
        deltas = [delta for batch in answer.batches for delta in batch.deltas]
        for delta in deltas:
            self.num_tokens[delta.request_id] += len(delta.token_ids)
        if any(self.num_tokens.values()):
            self.die("token")
        if any(delta.finish is not None for delta in deltas):
            self.die("last token")
        return answer


@dataclass
class Told:
    """All that a client got to know of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    num_tokens: tuple[int, int] = (0, 0)
    causes: dict[Any, int] = field(default_factory=dict)

    @property
    def content(self) -> tuple[object, ...]:
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish, self.num_tokens


async def tell(client: EngineClient, number: int, sampling: SamplingParams) -> Told:
    request = SubmitRequest(
        f"r{number}", client.client_id, pack_token_ids(PROMPT * 9), sampling, float(number)
    )
    assert isinstance(await client.submit([request]), Accepted)
    told = Told()
    is_stopped = number == len(SAMPLINGS) - 1
    has_ended = False
    async for delta in client.stream(request.request_id):
        if not has_ended:
            told.token_ids += delta.token_ids
            told.logprobs += delta.logprobs
        told.prompt_logprobs += delta.prompt_logprobs
        told.finish = delta.finish
        if is_stopped and not has_ended and len(told.token_ids) >= STOP_AFTER:
            has_ended = True
            del told.token_ids[STOP_AFTER:], told.logprobs[STOP_AFTER:]
            await client.end(EndRequest(request.request_id, EndReason.STOP, STOP_AFTER))
        if delta.usage is not None:
            told.num_tokens = delta.usage.prompt_tokens, delta.usage.completion_tokens
            told.causes = (
                dict(delta.usage.interruptions.causes) if delta.usage.interruptions else {}
            )
    return told


async def tell_all(client: EngineClient) -> list[Told]:
    return list(await asyncio.gather(*(tell(client, i, s) for i, s in enumerate(SAMPLINGS))))


@pytest.mark.parametrize("point", get_args(Point))
def test_a_scheduler_that_dies_at_any_point_changes_nothing(point: Point) -> None:
    async def run() -> None:
        async with slow_engine() as it:
            undisturbed = await tell_all(it.client)
        assert {told.finish for told in undisturbed} == {FinishReason.LENGTH, FinishReason.STOP}
        async with slow_engine() as dying, slow_engine() as successor:
            calls = MortalCalls(dying.actor, point)
            client = EngineClient(calls)
            client.start()
            await client.wait_ready(10)
            telling = asyncio.create_task(tell_all(client))
            await eventually(lambda: calls.is_cut)
            await dying.actor.give_up("it is dead")
            await eventually(lambda: client.info().state is EngineState.RECOVERING)
            calls.actor, calls.is_cut = successor.actor, False
            told = await asyncio.wait_for(telling, 20)
            assert [t.content for t in told] == [u.content for u in undisturbed]
            causes = {cause for t in told for cause in t.causes.items()}
            assert causes <= {(InterruptionCause.SCHEDULER_LOST, 1)}
            if point in ("token", "last token", "end"):
                assert causes
            assert client.num_streams == 0
            assert await successor.num_open() == 0
            await client.close()
            await asyncio.gather(*calls.background, return_exceptions=True)

    asyncio.run(run())


@runs
async def test_losses_that_no_scheduler_lived_to_tell_are_counted() -> None:
    async with engine(hold=True) as first, engine(hold=True) as second, engine() as third:
        client = EngineClient(first.calls)
        client.start()
        await client.wait_ready(10)
        request = SubmitRequest(
            "r", client.client_id, pack_token_ids(PROMPT), SamplingParams(20, seed=1), 0.0
        )
        await client.submit([request])
        reading = asyncio.create_task(_last_usage(client, "r"))
        await eventually(lambda: first.link.num_held)
        first.link.release()
        await asyncio.sleep(0.05)
        for lost, successor in ((first, second), (second, third)):
            first.calls.is_cut = True
            await lost.actor.give_up("it is dead")
            await eventually(lambda: client.info().state is EngineState.RECOVERING)
            first.calls.actor, first.calls.is_cut = successor.actor, False
            await eventually(lambda: client.info().is_ready)
        usage = await reading
        assert usage.completion_tokens == 20
        assert usage.interruptions is not None
        assert usage.interruptions.causes == {InterruptionCause.SCHEDULER_LOST: 2}
        assert usage.interruptions.stalled_seconds > 0
        await client.close()


async def _last_usage(client: EngineClient, request_id: str) -> Usage:
    usages = [delta.usage async for delta in client.stream(request_id) if delta.usage]
    return usages[-1]


@runs
async def test_a_replica_that_was_given_up_too_early_goes_on_with_what_it_has() -> None:
    async with slow_engine() as it:
        await it.client.submit([it.request("a")])
        stream = it.client.stream("a")
        first = await anext(stream)
        await it.actor.forget(it.client.client_id)
        token_ids = [*first.token_ids]
        async for delta in stream:
            token_ids += delta.token_ids
        assert tuple(token_ids) == EXPECTED
        assert delta.finish is FinishReason.LENGTH
        assert await it.num_open() == 0


@runs
async def test_requests_of_a_replica_that_is_known_to_be_dead_end_at_once() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("mine")])
        gone = it.request("gone")
        theirs = SubmitRequest(
            "gone", "dead", gone.prompt_token_ids, gone.sampling, gone.arrival_seconds
        )
        await it.actor.submit(encode(SubmitRequests((theirs,))))
        await it.actor.forget("dead")
        async with asyncio.timeout(5):
            while await it.num_open() > 1:
                await asyncio.sleep(0.002)
        assert it.client.num_streams == 1


@runs
async def test_nobody_waits_for_the_successor_of_an_engine_that_was_replaced() -> None:
    class ReplacedCalls(Calls):
        async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
            try:
                return await super().poll(client_id, last_batch)
            except EngineLostError:
                if client.info().state is not EngineState.RECOVERING:
                    raise
            await asyncio.sleep(0.01)
            raise EngineReplacedError("another one was deployed")

    async with engine(hold=True) as it:
        calls = ReplacedCalls(it.actor)
        client = EngineClient(calls)
        client.start()
        await client.wait_ready(10)
        request = SubmitRequest(
            "r", client.client_id, pack_token_ids(PROMPT), SamplingParams(20, seed=1), 0.0
        )
        await client.submit([request])
        calls.is_cut = True
        await it.actor.give_up("for the pending poll to return")
        last = [delta async for delta in client.stream("r")][-1]
        assert last.error == "another one was deployed"
        await client.close()
