"""The scheduler's mailbox and an ingress replica's client, in one process and without Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.engine_client import EngineClient
from cluster.errors import EngineLostError
from configs import load, resolve
from scheduler.actor import SchedulerActor
from scheduler.errors import CoreCrashedError
from scheduler.group import GroupSize
from scheduler.messages import (
    AbortRequests,
    EndRequest,
    FinishReason,
    PollAnswer,
    SamplingParams,
    SubmitAnswer,
    SubmitRequest,
    SubmitRequests,
    Tally,
    TallyAnswer,
    decode,
    decode_submit_answer,
    encode,
    pack_token_ids,
)
from tests.support.fake_model import run_solo
from tests.support.memory_link import MemoryLink

EPOCH = 5
NUM_BLOCKS = 16
BLOCK_SIZE = 16
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

    @contextmanager
    def _dying(self) -> Iterator[None]:
        """A scheduler whose core crashed is as good as dead."""
        self._check()
        try:
            yield
        except CoreCrashedError as error:
            raise EngineLostError(str(error)) from error

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        with self._dying():
            data = await self.actor.submit(encode(SubmitRequests(tuple(messages))))
        return decode_submit_answer(data)

    async def resume(self, client_id: str, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        data = encode(SubmitRequests(tuple(messages)))
        with self._dying():
            return decode_submit_answer(await self.actor.resume(client_id, data))

    async def end(self, message: EndRequest) -> None:
        with self._dying():
            await self.actor.end(encode(message))

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        while True:
            with self._dying():
                data = await self.actor.poll(client_id, last_batch)
            if self.num_lost_answers:
                self.num_lost_answers -= 1
                continue
            self._check()
            return decode(data, PollAnswer)

    async def exchange_counts(self, report: Tally) -> TallyAnswer:
        with self._dying():
            return decode(await self.actor.exchange_counts(encode(report)), TallyAnswer)

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

    async def next_group(self, epoch: int, size: GroupSize = SIZE) -> None:
        """Let another worker take the place of the one that was lost."""
        self.link = MemoryLink(size.num_blocks, BLOCK_SIZE, epoch=epoch, hold=self.link.hold)
        await self.actor.open_link(self.link)
        await self.actor.begin(epoch, size)

    async def num_open(self) -> int:
        counters = (await self.actor.status()).counters
        assert counters is not None
        return counters.open_requests


PROMPT = (1, 2, 3)


@asynccontextmanager
async def engine(
    *overrides: str,
    hold: bool = False,
    awaited: tuple[str, ...] = (),
    culprits: Collection[str] = (),
    may_crash: bool = False,
) -> AsyncIterator[Engine]:
    config = resolve(load(overrides=overrides, environ={}).config, "cpu")
    crashes: list[str] = []
    actor = SchedulerActor(config, on_crash=lambda: crashes.append("crash"))
    link = MemoryLink(NUM_BLOCKS, BLOCK_SIZE, epoch=EPOCH, hold=hold)
    await actor.open_link(link)
    await actor.begin(EPOCH, SIZE, awaited, culprits)
    calls = Calls(actor)
    client = EngineClient(calls)
    client.start()
    assert (await client.wait_ready(10)).is_ready
    try:
        yield Engine(actor, link, calls, client)
    finally:
        await client.close()
        await actor.stop()
    assert may_crash or not crashes


@asynccontextmanager
async def slow_engine(
    *, culprits: Collection[str] = (), may_crash: bool = False
) -> AsyncIterator[Engine]:
    """Its workers take a moment for each step, so that there is something to interrupt."""

    async def keep_answering(it: Engine) -> None:
        while True:
            it.link.release(it.link.num_held)
            await asyncio.sleep(0.005)

    async with engine(hold=True, culprits=culprits, may_crash=may_crash) as it:
        answering = asyncio.create_task(keep_answering(it))
        yield it
        answering.cancel()


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
