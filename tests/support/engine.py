"""The real scheduler in this process, over a worker in this process.

EngineClient ──► LocalCalls ──► SchedulerActor ──► step loop ──► LocalLink ──► worker
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.engine_client import EngineClient
from cluster.errors import EngineBusyError
from configs import Config, ResolvedConfig, resolve
from scheduler.actor import SchedulerActor
from scheduler.errors import CacheInUseError
from scheduler.group import GroupSize
from scheduler.messages import (
    AbortRequests,
    Admission,
    EndRequest,
    PollAnswer,
    SubmitRequest,
    SubmitRequests,
    Tally,
    TallyAnswer,
    Unavailable,
    decode,
    decode_submit_answer,
    encode,
)
from tests.support.local_link import LocalLink, StepWorker


class LocalCalls:
    """EngineCalls without a network, but through the wire format."""

    def __init__(self, actor: SchedulerActor) -> None:
        self._actor = actor

    async def submit(self, messages: Sequence[SubmitRequest]) -> Admission | Unavailable:
        return decode_submit_answer(
            await self._actor.submit(encode(SubmitRequests(tuple(messages))))
        )

    async def resume(
        self, client_id: str, messages: Sequence[SubmitRequest]
    ) -> Admission | Unavailable:
        data = encode(SubmitRequests(tuple(messages)))
        return decode_submit_answer(await self._actor.resume(client_id, data))

    async def end(self, message: EndRequest) -> None:
        await self._actor.end(encode(message))

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        return decode(await self._actor.poll(client_id, last_batch), PollAnswer)

    async def exchange_counts(self, report: Tally) -> TallyAnswer:
        return decode(await self._actor.exchange_counts(encode(report)), TallyAnswer)

    async def abort(self, ids: Sequence[str]) -> int:
        return await self._actor.abort(encode(AbortRequests(tuple(ids))))

    async def reset_prefix_cache(self) -> None:
        try:
            await self._actor.reset_prefix_cache()
        except CacheInUseError as error:
            raise EngineBusyError(str(error)) from error


@dataclass(frozen=True, slots=True)
class LocalEngine:
    client: EngineClient
    actor: SchedulerActor
    link: LocalLink
    config: ResolvedConfig
    size: GroupSize

    async def lose_group(self, reason: str) -> None:
        """The worker is gone, and somebody has noticed."""
        await self.actor.lose(self.link.epoch, reason)

    async def next_group(self) -> None:
        """Another worker takes its place, once."""
        epoch = self.link.epoch + 1
        await self.actor.open_link(
            LocalLink(self.link.worker, epoch, step_seconds=self.link.step_seconds)
        )
        await self.actor.begin(epoch, self.size)

    async def held_blocks(self) -> int:
        """Blocks of live requests."""
        status = await self.actor.status()
        assert status.counters is not None
        return status.counters.held_blocks


@asynccontextmanager
async def local_engine(
    worker: StepWorker,
    config: Config | None = None,
    *,
    vocab_size: int,
    num_blocks: int = 1025,
    max_model_len: int = 2048,
    step_seconds: float = 0.0,
) -> AsyncIterator[LocalEngine]:
    """A running engine, ready when entered."""
    resolved = resolve(config or Config(), "cpu")
    link = LocalLink(worker, step_seconds=step_seconds)
    actor = SchedulerActor(resolved, on_crash=lambda: None)
    await actor.open_link(link)
    size = GroupSize(
        num_ranks=1,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    await actor.begin(0, size)
    client = EngineClient(LocalCalls(actor))
    client.start()
    try:
        await client.wait_ready(timeout_seconds=10)
        yield LocalEngine(client, actor, link, resolved, size)
    finally:
        await client.close()
        await actor.stop()
        await asyncio.sleep(0)
