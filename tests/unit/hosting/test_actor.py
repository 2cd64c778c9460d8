"""What replicas may ask of a scheduler, and what its client makes of the answers."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import cluster.request_stream
import scheduler.actor
import scheduler.clients
from cluster.api_errors import UnavailableError
from cluster.engine_client import EngineClient
from cluster.errors import EngineUnavailableError
from cluster.generation import Generation
from configs import load, resolve
from scheduler.actor import SchedulerActor
from scheduler.clients import Clients
from scheduler.group import Pipeline
from scheduler.messages import (
    Accepted,
    EndReason,
    EndRequest,
    EngineState,
    FinishReason,
    InterruptionCause,
    PollAnswer,
    QueueFull,
    SamplingParams,
    SubmitAnswer,
    SubmitRequest,
    SubmitRequests,
    WorkerFault,
    decode,
    encode,
    pack_token_ids,
)
from scheduler.step_loop import StepLoop
from tests.support.hosted_engine import (
    EPOCH,
    EXPECTED,
    NUM_BLOCKS,
    SIZE,
    Calls,
    Engine,
    engine,
    eventually,
    read,
    runs,
)


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
        patch.setattr(cluster.request_stream, "MAX_UNREAD_BYTES", 2000)
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
async def test_draining_lets_what_was_accepted_end_and_be_told() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        await it.actor.set_drain("a new configuration is deployed")
        draining = asyncio.create_task(it.actor.wait_drained())
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
async def test_who_ends_all_waits_until_that_is_told() -> None:
    report = StepLoop._report

    def report_late(loop: StepLoop) -> None:
        time.sleep(0.02)
        report(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLoop, "_report", report_late)
        async with engine(hold=True) as it:
            await it.client.submit([it.request("a")])
            reading = asyncio.create_task(read(it.client, "a"))
            assert await it.actor.end_all("the test wants it") == 1
            await asyncio.sleep(0)
            assert reading.done()
            assert reading.result()[1] is FinishReason.ERROR


@runs
async def test_requests_of_a_replica_that_no_longer_polls_end() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.clients, "CLIENT_LOST_SECONDS", 0.3)
        patch.setattr(scheduler.clients, "POLL_SECONDS", 0.1)
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


@runs
async def test_a_replica_that_comes_back_gets_the_end_that_it_has_missed() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a", 3)])
        reading = asyncio.create_task(read(it.client, "a"))
        await let_pass(it, 2)
        it.link.release(1)
        await stand_still()  # so that the last token is still on its way
        await it.actor.forget(it.client.client_id)
        it.link.hold = False
        it.link.release(it.link.num_held)
        async with asyncio.timeout(10):
            assert await reading == (EXPECTED[:3], FinishReason.LENGTH)


@runs
async def test_no_token_comes_twice_to_a_replica_that_comes_back_at_once() -> None:
    async with engine(hold=True) as it:
        await it.client.submit([it.request("a")])
        reading = asyncio.create_task(read(it.client, "a"))
        await let_pass(it, 3)
        it.link.release(1)
        await stand_still()
        await it.actor.forget(it.client.client_id)
        # Its poll, before the event loop hears of the token: nothing here waits.
        await it.actor.poll(it.client.client_id, 99)
        it.link.hold = False
        it.link.release(it.link.num_held)
        async with asyncio.timeout(10):
            assert await reading == (EXPECTED, FinishReason.LENGTH)


async def let_pass(it: Engine, num_steps: int) -> None:
    """Let so many steps be answered, and their tokens be read."""
    for _ in range(num_steps):
        await eventually(lambda: it.link.num_held)
        it.link.release(1)
        await asyncio.sleep(0.02)
    await eventually(lambda: it.link.num_held)


async def stand_still() -> None:
    """What happens meanwhile on other threads finds its way to the event loop later."""
    time.sleep(0.1)


def test_who_stood_still_loses_nobody() -> None:
    clients = Clients()
    clients.see("other")
    began = time.monotonic()
    assert clients.lost(began) == []
    woke = began + 100.0
    assert clients.lost(woke) == []
    assert clients.lost(woke + 1) == []
    late = [woke + seconds for seconds in range(1, 20)]
    assert [clients.lost(now) for now in late][-1] == ["other"]


def encode_rest(request: SubmitRequest) -> tuple[Any, ...]:
    return request.prompt_token_ids, request.sampling, request.arrival_seconds


@runs
async def test_a_newer_poll_sends_the_older_one_home() -> None:
    async with engine() as it:
        await it.actor.resume("other", encode(SubmitRequests(())))
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
async def test_an_engine_is_waited_for_without_a_limit() -> None:
    """As replicas on Kubernetes do."""
    actor = SchedulerActor(resolve(load(environ={}).config, "cpu"))
    client = EngineClient(Calls(actor))
    client.start()
    waiting = asyncio.create_task(client.wait_ready())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await actor.give_up("no model")
    info = await asyncio.wait_for(waiting, 5)
    assert (info.state, info.reason) == (EngineState.FAILED, "no model")
    await client.close()


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
async def test_a_request_that_was_accepted_and_then_refused_is_ended() -> None:
    """Its submission arrived, the answer did not, and the engine began to drain before the next."""
    async with engine(hold=True) as it:
        submit = it.calls.submit

        async def submit_twice(messages: Sequence[SubmitRequest]) -> SubmitAnswer:
            await submit(messages)
            await it.actor.set_drain("it is drained")
            return await submit(messages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.calls, "submit", submit_twice)
            generation = Generation(
                it.client,
                [it.request("a", 200)],
                [],
                max_queue_seconds=60,
                arrived_seconds=0,
                num_choices_per_prompt=1,
            )
            with pytest.raises(UnavailableError):
                await generation.start()
        assert await it.num_open() == 1
        generation.end()
        async with asyncio.timeout(10):
            while await it.num_open():
                await asyncio.sleep(0.01)


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
            await it.actor.wait_lost(EPOCH)
            await it.actor.give_up("there is no hope")
            await read(it.client, "a")

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert "they differ" in caplog.text
    for private in (str(canary), "secret-salt", "7654321", repr(pack_token_ids([canary]))[2:-1]):
        assert private not in caplog.text


@runs
async def test_a_resized_group_goes_on_with_what_fits_and_tells_what_it_waits_for() -> None:
    async with engine(hold=True) as it:
        await it.actor.explain("too early to explain anything")
        await it.client.submit([it.request("short"), it.request("long", 150)])
        reading = {name: asyncio.create_task(read(it.client, name)) for name in ("short", "long")}
        for _ in range(70):
            await eventually(lambda: it.link.num_held)
            it.link.release()
        await it.actor.lose(EPOCH, "the workers change", InterruptionCause.RESIZE)
        await it.actor.explain("waiting for 1 GPU")
        await eventually(lambda: it.client.info().reason == "waiting for 1 GPU")
        assert it.client.info().state is EngineState.RECOVERING
        # The pool holds 64 tokens from now on, which is less than one of them has.
        await it.next_group(EPOCH + 1, replace(SIZE, num_blocks=5, pipeline=Pipeline(1, 4)))
        assert (await reading["long"])[1] is FinishReason.LENGTH
        assert await reading["short"] == (EXPECTED, FinishReason.LENGTH)
        await it.client.submit([it.request("next")])
        await eventually(lambda: it.link.num_held == 4)
        assert it.client.info().capacity_tokens == 64
        counters = (await it.actor.status()).counters
        assert counters is not None
        assert counters.preemptions == {"resize": 1}, "the short one had ended"
