"""A server's chaos, over HTTP: what can be struck, striking it, and whether the server is ready."""

from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from cluster.chaos_schedule import Strike
from cluster.errors import CommandError

_PROBE_SECONDS = 2.0
_MAX_ERROR_CHARS = 300


class NotNowError(CommandError):
    """Nobody is there for a moment who could carry it out."""


class SeenRecovery(msgspec.Struct, frozen=True):
    """One recovery of the engine. Seconds are those of `time.time` on its machine."""

    replaced: tuple[str, ...]
    reason: str
    noticed_seconds: float
    joined_seconds: float


class SeenState(msgspec.Struct, frozen=True):
    processes: tuple[str, ...]
    recoveries: tuple[SeenRecovery, ...]


class _Struck(msgspec.Struct):
    struck_seconds: float


class _Ready(msgspec.Struct):
    status: str


class ChaosClient:
    def __init__(self, session: aiohttp.ClientSession, base_url: str, admin_key: str) -> None:
        self._session = session
        self._base_url = base_url
        self._headers = {"authorization": f"Bearer {admin_key}"}

    async def check(self, strikes: Sequence[Strike]) -> None:
        """Raises CommandError unless all of them can be carried out."""
        try:
            status, body = await self._ask("GET", None)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CommandError(
                f"No server answers at {self._base_url}: {error}. Name another with --url."
            ) from error
        if status == 404:
            raise CommandError(
                f"The server at {self._base_url} lets nobody strike its processes: start it with "
                f"server.enable_chaos true, and with a server.admin_key (PALIMPSEST_ADMIN_KEY)."
            )
        if status == 401:
            raise CommandError(
                "The admin key is missing or wrong: give the server's server.admin_key with "
                "--admin-key-file, or in PALIMPSEST_ADMIN_KEY."
            )
        if status != 200:
            raise CommandError(f"The server cannot be struck now: {_message(body)}.")
        processes = msgspec.json.decode(body, type=SeenState).processes
        for strike in strikes:
            if strike.process not in processes:
                raise CommandError(
                    f"There is no {strike.process} to {strike.action}: the server has "
                    f"{', '.join(processes)}."
                )

    async def recoveries(self) -> tuple[SeenRecovery, ...]:
        """How the engine came back so far; none while nobody answers."""
        try:
            status, body = await self._ask("GET", None)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ()
        return msgspec.json.decode(body, type=SeenState).recoveries if status == 200 else ()

    async def strike(self, strike: Strike) -> float | None:
        """When it was struck, on the clock of its machine; None: the answer broke off, as it does
        when it would have had to come through the process that was struck.

        Returns when a stall is over. Raises CommandError, of which NotNowError may pass.
        """
        body = {"action": strike.action, "process": strike.process, "seconds": strike.seconds}
        try:
            status, answer = await self._ask("POST", body)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        if status >= 500 and strike.process.startswith("replica") and not answer.startswith(b"{"):
            return None  # a proxy in front says that nobody is behind it any more
        if status != 200:
            kind = NotNowError if status == 503 else CommandError
            raise kind(f"{strike} failed: {_message(answer)}.")
        return msgspec.json.decode(answer, type=_Struck).struck_seconds

    async def state(self) -> str:
        """As `/ready` tells it, or `unreachable`."""
        timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        try:
            async with self._session.get(f"{self._base_url}/ready", timeout=timeout) as answer:
                return msgspec.json.decode(await answer.read(), type=_Ready).status
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return "unreachable"

    async def _ask(self, method: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        async with self._session.request(
            method, f"{self._base_url}/chaos", json=body, headers=self._headers
        ) as answer:
            return answer.status, await answer.read()


def _message(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        said = body.decode(errors="replace")
    return str(said)[:_MAX_ERROR_CHARS].rstrip(".")
