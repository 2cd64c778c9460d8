"""What a replica of a new cluster waits for before it takes part."""

import asyncio
from collections.abc import Sequence

import pytest

from cluster.engine_client import EngineClient
from scheduler.messages import (
    EndRequest,
    EngineInfo,
    EngineState,
    PollAnswer,
    SubmitAnswer,
    SubmitRequest,
    Tally,
    TallyAnswer,
)


class Calls:
    """An engine that only says how it is."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        raise AssertionError

    async def resume(self, client_id: str, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        raise AssertionError

    async def end(self, message: EndRequest) -> None:
        raise AssertionError

    async def abort(self, ids: Sequence[str]) -> int:
        raise AssertionError

    async def exchange_counts(self, report: Tally) -> TallyAnswer:
        raise AssertionError

    async def reset_prefix_cache(self) -> None:
        raise AssertionError

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        await asyncio.sleep(0.001)
        return PollAnswer(last_batch, (), self.info)


@pytest.mark.parametrize(
    "then",
    [
        EngineInfo(EngineState.READY),
        EngineInfo(EngineState.FAILED, "no model"),
        EngineInfo(EngineState.STARTING, "the one before it was replaced", epoch=1),
    ],
)
def test_the_first_engine_is_waited_for(then: EngineInfo) -> None:
    async def run() -> None:
        calls = Calls(EngineInfo(EngineState.STARTING, "workers are loading the model"))
        client = EngineClient(calls)
        client.start()
        waiting = asyncio.create_task(client.wait_first_engine())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        calls.info = then
        async with asyncio.timeout(5):
            await waiting
        assert client.info() == then
        await client.close()

    asyncio.run(run())
