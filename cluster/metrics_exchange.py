"""A replica's part in the common sum: it reports what it counted, and learns what all counted."""

import asyncio
import contextlib
import logging
from typing import Protocol

from cluster.errors import EngineLostError
from cluster.metrics_counts import ReplicaCounts
from scheduler.messages import Counts, Gauges, Tally, TallyAnswer
from scheduler.tally import EMPTY, merged, total, with_counts

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
"""What others see of this replica is no older."""
_ANSWER_SECONDS = 1.0
"""After that a scrape is answered with what is known."""


class CountsCalls(Protocol):
    async def exchange_counts(self, report: Tally) -> TallyAnswer:
        """Tell the scheduler what this replica knows, for what everybody counted.

        Raises EngineLostError when there is none.
        """
        ...


class MetricsExchange:
    """Between `start` and `close` it reports by itself. For one event loop."""

    def __init__(self, calls: CountsCalls, client_id: str) -> None:
        self.counts = ReplicaCounts()
        self._calls = calls
        self._client_id = client_id
        self._tally = EMPTY
        self._reporter: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Safe to call again."""
        if self._reporter is None:
            self._reporter = asyncio.create_task(self._report_forever(), name="metrics-report")

    async def close(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
            self._reporter = None

    async def everything(self) -> tuple[Counts, Gauges | None]:
        """The sum of what all replicas and schedulers counted, and how full the engine is.

        Asked now, and nothing is added that only this replica knows: so scrapes of different
        replicas, one after the other, never see a counter fall. While no scheduler answers it is
        what the last one said, and None.
        """
        gauges = None
        with contextlib.suppress(EngineLostError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                gauges = await self._exchange()
        return total(self._tally), gauges

    async def _exchange(self) -> Gauges | None:
        report = with_counts(self._tally, self._client_id, self.counts.copy())
        answer = await self._calls.exchange_counts(report)
        self._tally = merged(self._tally, answer.tally)
        return answer.gauges

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            try:
                await self._exchange()
            except EngineLostError:
                pass  # the next one will know
            except Exception:
                logger.exception("reporting the metrics failed; trying again")
