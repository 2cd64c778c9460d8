"""Asking a running server how it is."""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServerState:
    name: str
    """As `/ready` says: starting, ready, draining or failed; or unreachable."""
    reason: str

    @property
    def is_ready(self) -> bool:
        return self.name == "ready"

    @property
    def has_failed(self) -> bool:
        return self.name == "failed"


class Probe:
    def __init__(self, url: str) -> None:
        """`url` is that of the application, without the path of an endpoint."""
        self._url = f"{url}/ready"

    def state(self) -> ServerState:
        """What `/ready` says now; raises nothing."""
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_SECONDS) as answer:
                return _state(answer.read())
        except urllib.error.HTTPError as error:
            return _state(error.read())
        except (OSError, http.client.HTTPException) as error:
            return ServerState("unreachable", str(error))


def _state(body: bytes) -> ServerState:
    try:
        content = json.loads(body)
        return ServerState(content["status"], (content["reason"] or "").rstrip("."))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerState("unreachable", "something else answers there")
