"""A load that goes on, strikes in the middle of it, and what was seen of each.

undisturbed: every prompt once ──► the texts to expect
disturbed:   the same prompts again and again ──────────────────────────► until all is well again
                    strike          strike              one more round
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.bench_client import BenchClient, Outcome
from cluster.bench_load import Pace, run_load
from cluster.bench_prompts import BenchRequest
from cluster.chaos_client import ChaosClient, NotNowError, SeenRecovery
from cluster.chaos_schedule import Strike
from cluster.errors import CommandError

QUIET_SECONDS = 5.0
"""A strike of which nothing has been seen for so long will not be noticed."""
_TICK_SECONDS = 0.1
_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 0.5
_SAME_TIME_SECONDS = 0.5
"""By which the clocks of two machines may differ."""


@dataclass(slots=True)
class Seen:
    """A strike and what followed. Seconds without a name of their own count from the strike."""

    strike: Strike
    at: float
    """When it was struck, on `time.perf_counter` of this process."""
    noticed_seconds: float | None = None
    """None: nobody noticed."""
    recovered_seconds: float | None = None
    """None: not noticed, or not back in time."""
    replaced: tuple[str, ...] = ()

    @property
    def end(self) -> float:
        """When it was over, on the same clock."""
        return self.at + max(self.strike.seconds, self.recovered_seconds or 0.0)

    def __str__(self) -> str:
        if self.noticed_seconds is None:
            return "nobody noticed"
        noticed = f"noticed after {self.noticed_seconds:.2f} s"
        if self.recovered_seconds is None:
            return f"{noticed}, and not back"
        return f"{noticed}, ready again after {self.recovered_seconds:.2f} s"


@dataclass(slots=True)
class ChaosRecord:
    """Everything that one run saw."""

    undisturbed: list[Outcome]
    """Of each prompt."""
    asked: list[tuple[int, Outcome]] = field(default_factory=list)
    """With strikes: the number of the prompt, and what came."""
    seen: list[Seen] = field(default_factory=list)
    duration_seconds: float = 0.0


class ChaosRun:
    def __init__(
        self,
        client: BenchClient,
        chaos: ChaosClient,
        requests: Sequence[BenchRequest],
        *,
        concurrency: int,
        recover_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        """`recover_seconds`: how long each strike's recovery is waited for."""
        self._client = client
        self._chaos = chaos
        self._requests = requests
        self._concurrency = concurrency
        self._recover_seconds = recover_seconds
        self._tell = tell
        self._states: list[tuple[float, str]] = []
        """What `/ready` said from when on."""
        self._asked: list[tuple[int, Outcome]] = []
        self._is_over = asyncio.Event()

    async def run(self, strikes: Sequence[Strike]) -> ChaosRecord:
        """Raises CommandError if the undisturbed run fails, or a strike cannot be carried out."""
        self._tell(f"{len(self._requests)} prompts, undisturbed")
        pace = Pace(concurrency=self._concurrency)
        record = ChaosRecord((await run_load(self._client, self._requests, pace, seed=0)).outcomes)
        for outcome in record.undisturbed:
            if outcome.error is not None:
                raise CommandError(f"A request failed before any strike: {outcome.error}.")
        self._tell("the same again and again, with strikes")
        began = time.perf_counter()
        self._states.append((began, "ready"))
        numbers = itertools.cycle(range(len(self._requests)))
        watching = asyncio.create_task(self._watch())
        loads = [asyncio.create_task(self._load(numbers)) for _ in range(self._concurrency)]
        striking = [asyncio.create_task(self._strike(began, strike)) for strike in strikes]
        tasks = [watching, *loads, *striking]
        try:
            record.seen = list(await asyncio.gather(*striking))
            await self._one_more_round()
            self._is_over.set()
            await asyncio.gather(*loads)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        record.asked = self._asked
        record.duration_seconds = time.perf_counter() - began
        return record

    async def _load(self, numbers: "itertools.cycle[int]") -> None:
        while not self._is_over.is_set():
            number = next(numbers)
            outcome = await self._client.ask(self._requests[number])
            self._asked.append((number, outcome))
            if outcome.error is not None:
                await asyncio.sleep(_PAUSE_SECONDS)  # as a client that tries again

    async def _one_more_round(self) -> None:
        until = len(self._asked) + len(self._requests)
        deadline = time.perf_counter() + self._recover_seconds
        while len(self._asked) < until and time.perf_counter() < deadline:
            await asyncio.sleep(_TICK_SECONDS)

    async def _watch(self) -> None:
        while True:
            state = await self._chaos.state()
            if self._states[-1][1] != state:
                self._states.append((time.perf_counter(), state))
            await asyncio.sleep(_TICK_SECONDS)

    async def _strike(self, began: float, strike: Strike) -> Seen:
        await asyncio.sleep(max(0.0, began + strike.at_seconds - time.perf_counter()))
        sent = time.perf_counter()
        struck_seconds = await self._try(strike)
        ended = time.perf_counter()
        seen = Seen(strike, ended)
        if struck_seconds is not None:
            # The signal falls later than it is asked for, by the start of a process, and earlier
            # than is told. Another machine's clock may say anything, so within what is known.
            told = ended - (time.time() - struck_seconds)
            seen.at = min(max(told, sent), ended - strike.seconds)
        self._tell(f"{seen.at - began:.1f} s: {strike}")
        while not await self._is_settled(seen, struck_seconds):
            if time.perf_counter() > ended + self._recover_seconds:
                break
            await asyncio.sleep(_POLL_SECONDS)
        self._tell(f"{strike}: {seen}")
        return seen

    async def _try(self, strike: Strike) -> float | None:
        """See `ChaosClient.strike`; tried again while an earlier strike is still felt."""
        deadline = time.perf_counter() + self._recover_seconds
        while True:
            try:
                return await self._chaos.strike(strike)
            except NotNowError:
                if time.perf_counter() > deadline:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    async def _is_settled(self, seen: Seen, struck_seconds: float | None) -> bool:
        """Take up what can be known of a strike by now; True if there is no more to come."""
        if struck_seconds is not None:
            recovery = recovery_of(seen.strike, struck_seconds, await self._chaos.recoveries())
            if recovery is not None:
                seen.noticed_seconds = max(0.0, recovery.noticed_seconds - struck_seconds)
                seen.recovered_seconds = max(0.0, recovery.joined_seconds - struck_seconds)
                seen.replaced = recovery.replaced
                return self._states[-1][1] == "ready"
        gap = not_ready_after(seen.at, self._states)
        if gap is None:
            return time.perf_counter() > seen.at + seen.strike.seconds + QUIET_SECONDS
        seen.noticed_seconds = max(0.0, gap[0] - seen.at)
        if gap[1] is None:
            return False
        seen.recovered_seconds = gap[1] - seen.at
        # The supervisor tells of a recovery a moment after the server is ready.
        return time.perf_counter() > gap[1] + 2 * _POLL_SECONDS


def recovery_of(
    strike: Strike, struck_seconds: float, recoveries: Sequence[SeenRecovery]
) -> SeenRecovery | None:
    """The first one that put another process in the place of the one that was struck."""
    for recovery in recoveries:
        is_later = recovery.joined_seconds > struck_seconds - _SAME_TIME_SECONDS
        if is_later and strike.process in recovery.replaced:
            return recovery
    return None


def not_ready_after(
    at: float, states: Sequence[tuple[float, str]]
) -> tuple[float, float | None] | None:
    """When the server was first not ready at or after `at`, and from when on it was again."""
    begun: float | None = None
    for number, (since, state) in enumerate(states):
        until = states[number + 1][0] if number + 1 < len(states) else None
        if begun is None and state != "ready" and (until is None or until > at):
            begun = max(since, at)
        elif begun is not None and state == "ready":
            return begun, since
    return None if begun is None else (begun, None)
