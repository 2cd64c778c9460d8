"""What every request passes before it reaches a route: its id, its key, the size of its body."""

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api_errors import ApiError, AuthenticationError, BodyTooLargeError, our_fault
from cluster.logs import REQUEST_ID

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
MAX_BODY_WORK = 2_500_000
"""Of JSON, as `_work` counts it. Reading JSON holds the interpreter, and with it everybody's
streams: 16 MB of tiny objects take seconds, this much takes half of one."""
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Probes and scrapers carry no keys."""

_MAX_LOGGED_CHARACTERS = 100
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class KeyDigests:
    """The keys that let somebody in, as salted hashes: this travels through Ray and its logs."""

    salt: bytes = b""
    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str]) -> "KeyDigests":
        salt = secrets.token_bytes(16)
        return cls(salt, tuple(_digest(salt, key) for key in keys))

    def __bool__(self) -> bool:
        return bool(self.digests)

    def match(self, key: str) -> int | None:
        """The number of the key, or None. How long it takes tells nothing."""
        given = _digest(self.salt, key)
        matches = [hmac.compare_digest(given, known) for known in self.digests]
        return matches.index(True) if any(matches) else None


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode()).digest()


class HeaderFilter:
    """Takes away the headers of a request that Serve would pass on or trip over: a request id that
    is none, instead of which it makes one, and what is not UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [(n, value) for n, value in scope["headers"] if _is_good(n, value)]
        await self._app(scope, receive, send)


def _is_good(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return _REQUEST_ID.fullmatch(value) is not None
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class Guard:
    """Wraps the application. Whatever happens inside, the answer has a request id and errors
    have a body. `scope["request_id"]` is the id."""

    def __init__(
        self, app: ASGIApp, *, sends_request_id: bool, on_answer: Callable[[int], None]
    ) -> None:
        """`on_answer` is told the status of each answer but those to probes and scrapers."""
        self._app = app
        self._sends_request_id = sends_request_id
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope["request_id"] = request_id
        token = REQUEST_ID.set(request_id)
        began_seconds = time.monotonic()
        answer = _Answer(send, request_id if self._sends_request_id else None)
        try:
            await self._app(scope, receive, answer)
        except Exception:
            logger.exception("the request failed")
            await answer.error(our_fault())
        finally:
            if answer.status is not None and _path_of(scope) not in OPEN_PATHS:
                self._on_answer(answer.status)
            _log_answer(scope, answer.status, time.monotonic() - began_seconds)
            REQUEST_ID.reset(token)


def _path_of(scope: Scope) -> str:
    """Within the application: under a route prefix a path begins with it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _log_answer(scope: Scope, status: int | None, seconds: float) -> None:
    """`status` is None where the client went away first."""
    path = scope["path"][:_MAX_LOGGED_CHARACTERS]
    logger.log(
        logging.DEBUG if _path_of(scope) in OPEN_PATHS else logging.INFO,
        "%s %s: %s after %.3f s",
        scope["method"],
        path,
        status or "no answer",
        seconds,
        extra={
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
        },
    )


class Gate:
    """Lets requests with a key in, and bodies that are not too large.

    `scope["api_key"]` is the number of the client's key, or None.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: KeyDigests,
        *,
        admin_key: KeyDigests,
        admin_paths: Collection[str],
    ) -> None:
        """Without keys every request is let in; `admin_paths` take the admin key alone."""
        self._app = app
        self._api_keys = api_keys
        self._admin_key = admin_key
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = _Answer(send, None)
        try:
            scope["api_key"] = self._key_of(_path_of(scope), headers)
            _check_length(headers)
            await self._app(scope, _Body(receive), answer)
        except ApiError as error:
            await answer.error(error)

    def _key_of(self, path: str, headers: Headers) -> int | None:
        """The number of the key, None where none is needed; raises AuthenticationError."""
        if path in self._admin_paths:
            if _match(self._admin_key, headers) is None:
                raise AuthenticationError(
                    "This path needs the admin key: send the header Authorization: Bearer KEY.",
                    code="invalid_api_key",
                )
            return None
        if not self._api_keys or path in OPEN_PATHS:
            return None
        number = _match(self._api_keys, headers)
        if number is None:
            raise AuthenticationError(
                "This server needs an API key: send the header Authorization: Bearer KEY.",
                code="invalid_api_key",
            )
        return number


def _match(keys: KeyDigests, headers: Headers) -> int | None:
    """The number of the key in the headers; None if there is none, or a wrong one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return keys.match(key.strip()) if scheme.lower() == "bearer" else None


class _Answer:
    """Passes an answer on, with the request id in its headers unless that is None."""

    def __init__(self, send: Send, request_id: str | None) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        """None until an answer begins."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._request_id is not None:
                message.setdefault("headers", [])
                MutableHeaders(raw=message["headers"])["x-request-id"] = self._request_id
        await self._send(message)

    async def error(self, error: ApiError) -> None:
        """Answer with `error`, unless an answer has begun."""
        if self.status is not None:
            return
        headers = {"content-type": "application/json", **error.headers}
        await self(
            {
                "type": "http.response.start",
                "status": error.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )
        await self({"type": "http.response.body", "body": json.dumps(error.body()).encode()})


class ClientGoneError(HTTPException):
    """Nobody is there any more to be answered. The status is for the log alone."""

    def __init__(self) -> None:
        super().__init__(499)


class _Body:
    """Receives the body of a request up to the limit, whatever its headers promised."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False
        self._num_bytes = 0
        self._work = 0

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        # HTTPException is the one that FastAPI lets through while it reads a body.
        if message["type"] == "http.disconnect" and not self._is_whole:
            raise ClientGoneError
        self._is_whole = not message.get("more_body", False)
        body = message.get("body", b"")
        self._num_bytes += len(body)
        self._work += _work(body)
        if self._num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, too_large().message)
        if self._work > MAX_BODY_WORK:
            raise HTTPException(
                413,
                "The body of a request has too many parts: it may hold at most 2500000 values, or"
                " 300000 objects.",
            )
        return message


def _work(content: bytes) -> int:
    """What it costs at most to read a piece of JSON, in numbers of a list. Texts hold these signs
    too, but 4 MB of them never so many."""
    return (
        content.count(b",")
        + 3 * content.count(b":")
        + 3 * content.count(b"[")
        + 8 * content.count(b"{")
    )


def too_large() -> BodyTooLargeError:
    return BodyTooLargeError(f"The body of a request may have at most {MAX_BODY_BYTES} bytes.")


def _check_length(headers: Headers) -> None:
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large()


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given.encode()):
        return given
    return uuid.uuid4().hex
