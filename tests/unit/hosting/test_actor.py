"""The scheduler's mailbox and an ingress replica's client, in one process and without Ray."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import cluster.engine_client
import scheduler.actor
from cluster.engine_client import EngineClient
from cluster.errors import EngineLostError, EngineUnavailableError
from configs import load, resolve
from scheduler.actor import GroupSize, SchedulerActor
from scheduler.messages import (
    AbortRequests,
    Accepted,
    EndReason,
    EndRequest,
    EngineState,
    FinishReason,
    PollAnswer,
    QueueFull,
    SamplingParams,
    SubmitAnswer,
    SubmitRequest,
    SubmitRequests,
    WorkerFault,
    decode,
    decode_submit_answer,
    encode,
    pack_token_ids,
)
from tests.support.fake_model import run_solo
from tests.support.memory_link import MemoryLink

EPOCH = 5
NUM_BLOCKS = 16
SIZE = GroupSize(num_ranks=1, num_blocks=NUM_BLOCKS, max_model_len=1024, vocab_size=32)


class Calls:
    """EngineCalls to an actor in this process; can be cut off."""

    def __init__(self, actor: SchedulerActor) -> None:
        self.actor = actor
        self.is_cut = False
        self.num_lost_answers = 0
        """So many polls run, and their answers are lost on the way."""

    def _check(self) -> None:
        if self.is_cut:
            raise EngineLostError("the scheduler died")

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        self._check()
        data = await self.actor.submit(encode(SubmitRequests(tuple(messages))))
        return decode_submit_answer(data)

    async def end(self, message: EndRequest) -> None:
        self._check()
        await self.actor.end(encode(message))

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        while True:
            self._check()
            data = await self.actor.poll(client_id, last_batch)
            if self.num_lost_answers:
                self.num_lost_answers -= 1
                continue
            self._check()
            return decode(data, PollAnswer)

    async def abort(self, ids: Sequence[str]) -> int:
        return await self.actor.abort(encode(AbortRequests(tuple(ids))))

    async def reset_prefix_cache(self) -> None:
        await self.actor.reset_prefix_cache()


@dataclass
class Engine:
    actor: SchedulerActor
    link: MemoryLink
    calls: Calls
    client: EngineClient

    def request(self, request_id: str, max_tokens: int = 20) -> SubmitRequest:
        return SubmitRequest(
            request_id=request_id,
            client_id=self.client.client_id,
            prompt_token_ids=pack_token_ids(PROMPT),
            sampling=SamplingParams(max_tokens, seed=1),
            arrival_seconds=0.0,
        )

    async def num_open(self) -> int:
        counters = (await self.actor.status()).counters
        assert counters is not None
        return counters.open_requests


PROMPT = (1, 2, 3)


@asynccontextmanager
async def engine(*overrides: str, hold: bool = False) -> AsyncIterator[Engine]:
    config = resolve(load(overrides=overrides, environ={}).config, "cpu")
    crashes: list[str] = []
    actor = SchedulerActor(config, on_crash=lambda: crashes.append("crash"))
    link = MemoryLink(NUM_BLOCKS, config.cache.block_size, epoch=EPOCH, hold=hold)
    await actor.open_link(link)
    await actor.begin(EPOCH, SIZE)
    calls = Calls(actor)
    client = EngineClient(calls)
    client.start()
    assert (await client.wait_ready(10)).is_ready
    try:
        yield Engine(actor, link, calls, client)
    finally:
        await client.close()
        await actor.stop()
    assert not crashes


def runs(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


async def eventually(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.002)


async def read(
    client: EngineClient, request_id: str
) -> tuple[tuple[int, ...], FinishReason | None]:
    token_ids: list[int] = []
    finish = None
    async for delta in client.stream(request_id):
        token_ids += delta.token_ids
        finish = delta.finish
    return tuple(token_ids), finish


EXPECTED = run_solo(PROMPT, SamplingParams(20, seed=1), 1024).token_ids


@runs
async def test_a_stream_brings_every_token_and_one_end() -> None:
    async with engine() as it:
        messages = [it.request(f"r{i}") for i in range(30)]
        assert isinstance(await it.client.submit(messages), Accepted)
        answers = await asyncio.gather(*(read(it.client, m.request_id) for m in messages))
        assert set(answers) == {(EXPECTED, FinishReason.LENGTH)}
        assert it.client.num_streams == 0
        info = it.client.info()
        assert (info.epoch, info.num_blocks, info.capacity_tokens) == (EPOCH, NUM_BLOCKS, 240)
        assert (info.max_model_len, info.vocab_size, info.block_size) == (1024, 32, 16)


@runs
async def test_lost_answers_lose_no_token_and_repeat_none() -> None:
    async with engine() as it:
        it.calls.num_lost_answers = 7
        await it.client.submit([it.request("a")])
        assert await read(it.client, "a") == (EXPECTED, FinishReason.LENGTH)


@runs
async def test_submitting_again_changes_nothing() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        assert isinstance(await it.client.submit([it.request("a")]), Accepted)
        reading = asyncio.create_task(read(it.client, "a"))
        while not reading.done():
            await eventually(lambda: it.link.num_held or reading.done())
            it.link.release(it.link.num_held)
        assert reading.result() == (EXPECTED, FinishReason.LENGTH)


@runs
async def test_a_refusal_leaves_no_stream() -> None:
    async with engine("scheduler.max_waiting_requests=2", hold=True) as it:
        for i in range(20):
            answer = await it.client.submit([it.request(f"r{i}")])
            if isinstance(answer, QueueFull):
                break
        assert isinstance(answer, QueueFull)
        with pytest.raises(KeyError):
            await anext(it.client.stream(f"r{i}"))
        assert it.client.num_streams == i


@runs
async def test_after_an_abort_nothing_is_left_on_either_side() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("read"), it.request("unread")])
        stream = it.client.stream("read")
        await eventually(lambda: it.link.num_held)
        it.link.release()
        await anext(stream)
        for name in ("read", "unread", "unknown"):
            await it.client.end(EndRequest(name, EndReason.ABORT))
        assert it.client.num_streams == 0
        assert await it.num_open() == 0


@runs
async def test_a_stop_from_outside_brings_the_usage_it_names() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        stream = it.client.stream("a")
        for _ in range(3):
            await eventually(lambda: it.link.num_held)
            it.link.release()
            await anext(stream)
        await it.client.end(EndRequest("a", EndReason.STOP, 2))
        last = [delta async for delta in stream][-1]
        assert last.finish is FinishReason.STOP
        assert last.usage is not None
        assert last.usage.completion_tokens == 2


@runs
async def test_a_reader_that_does_not_read_is_ended() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.engine_client, "MAX_UNREAD_BYTES", 2000)
        async with engine(hold=True) as it:
            await it.client.submit([it.request("slow", 150), it.request("other", 50)])
            other = asyncio.create_task(read(it.client, "other"))
            num_steps = 0
            while await it.num_open():
                if it.link.num_held:
                    it.link.release()
                    num_steps += 1
                await asyncio.sleep(0.002)
            assert (await other)[1] is FinishReason.LENGTH
            assert num_steps < 100
            token_ids, finish = await read(it.client, "slow")
            assert finish is FinishReason.ABORT
            assert 0 < len(token_ids) < 100


@runs
async def test_a_loss_of_the_workers_is_told_to_all() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        await eventually(lambda: it.link.num_held)
        waiting = asyncio.create_task(it.actor.wait_lost())
        it.link.say(WorkerFault(EPOCH, 0, 0, "MirrorDriftError", "they differ"))
        last = [delta async for delta in it.client.stream("a")][-1]
        assert last.error is not None
        assert "they differ" in last.error
        assert await waiting == last.error
        await eventually(lambda: it.client.info().state is EngineState.FAILED)
        with pytest.raises(EngineUnavailableError, match="they differ"):
            await it.client.submit([it.request("b")])
        assert (await it.actor.status()).counters is None


@runs
async def test_a_lost_scheduler_ends_streams_and_its_successor_serves_on() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        it.calls.is_cut = True
        with pytest.raises(EngineUnavailableError, match="died"):
            await it.client.submit([it.request("b")])
        await it.actor.give_up("for the pending poll to return")
        last = [delta async for delta in it.client.stream("a")][-1]
        assert last.finish is FinishReason.ERROR
        async with engine() as successor:
            it.calls.actor, it.calls.is_cut = successor.actor, False
            await eventually(lambda: it.client.info().is_ready)
            await it.client.submit([it.request("c")])
            assert await read(it.client, "c") == (EXPECTED, FinishReason.LENGTH)


@runs
async def test_draining_lets_what_was_accepted_end_and_be_told() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        draining = asyncio.create_task(it.actor.drain("a new configuration is deployed"))
        await eventually(lambda: it.client.info().state is EngineState.DRAINING)
        with pytest.raises(EngineUnavailableError, match="new configuration"):
            await it.client.submit([it.request("b")])
        reading = asyncio.create_task(read(it.client, "a"))
        while not reading.done():
            assert not draining.done()
            await eventually(lambda: it.link.num_held or reading.done())
            it.link.release(it.link.num_held)
        assert reading.result() == (EXPECTED, FinishReason.LENGTH)
        await asyncio.wait_for(draining, 10)


@runs
async def test_requests_of_a_replica_that_no_longer_polls_end() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.actor, "CLIENT_LOST_SECONDS", 0.3)
        patch.setattr(scheduler.actor, "POLL_SECONDS", 0.1)
        patch.setattr(scheduler.actor, "_TICK_SECONDS", 0.05)
        async with engine(hold=True) as it:
            await it.client.submit([it.request("mine")])
            gone = it.request("gone")
            data = encode(SubmitRequests((SubmitRequest("gone", "other", *encode_rest(gone)),)))
            await it.actor.submit(data)
            assert await it.num_open() == 2
            async with asyncio.timeout(10):
                while await it.num_open() > 1:
                    await asyncio.sleep(0.02)
            assert it.client.num_streams == 1


def encode_rest(request: SubmitRequest) -> tuple[Any, ...]:
    return request.prompt_token_ids, request.sampling, request.arrival_seconds


@runs
async def test_a_newer_poll_sends_the_older_one_home() -> None:
    async with engine() as it:
        await it.actor.poll("other", 0)  # the first one always answers at once
        older = asyncio.create_task(it.actor.poll("other", 0))
        await asyncio.sleep(0.01)
        assert not older.done()
        newer = asyncio.create_task(it.actor.poll("other", 0))
        answer = decode(await asyncio.wait_for(older, 2), PollAnswer)
        assert (answer.number, answer.batches) == (0, ())
        assert not newer.done()
        newer.cancel()


@runs
async def test_before_the_workers_are_there_nothing_is_taken_and_the_reason_is_told() -> None:
    config = resolve(load(environ={}).config, "cpu")
    actor = SchedulerActor(config)
    client = EngineClient(Calls(actor))
    client.start()
    info = await client.wait_ready(0.1)
    assert info.state is EngineState.STARTING
    with pytest.raises(EngineUnavailableError, match="not there yet"):
        await client.submit([])
    await client.end(EndRequest("a", EndReason.ABORT))
    assert (await actor.status()).counters is None
    await client.close()


@runs
async def test_closing_ends_open_streams() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        reading = asyncio.create_task(read(it.client, "a"))
        await asyncio.sleep(0)
        await it.client.close()
        assert await reading == ((), FinishReason.ERROR)


def test_no_token_id_and_no_salt_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    canary = 1_234_567

    async def run() -> None:
        async with engine(hold=True) as it:
            prompt = pack_token_ids([canary] * 5)
            sampling = SamplingParams(9, seed=7_654_321)
            request = SubmitRequest(
                "a", it.client.client_id, prompt, sampling, 0.0, cache_salt="secret-salt"
            )
            await it.client.submit([request])
            await eventually(lambda: it.link.num_held)
            it.link.say(WorkerFault(EPOCH, 0, 0, "MirrorDriftError", "they differ"))
            await read(it.client, "a")

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert "they differ" in caplog.text
    for private in (str(canary), "secret-salt", "7654321", repr(pack_token_ids([canary]))[2:-1]):
        assert private not in caplog.text
