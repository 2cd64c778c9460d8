"""Logging of every process: one form, one level, and the id of the request that a line is about.

Lines go to stderr, which Ray keeps in files beside its own logs. They hold ids, counts and
reasons, never what a client sent or got.
"""

import logging
import time
from contextvars import ContextVar
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from configs import ServerConfig

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that the current task works on, as its client knows it."""

# Of libraries of ours that speak through the root logger, too, these talk of every request.
_QUIET = ("httpx", "httpcore", "asyncio")


def set_up_logging(server: ServerConfig | None = None) -> None:
    """Log as `server` says, from now on; by default as its defaults do. Safe to call again."""
    server = server or ServerConfig()
    handler = logging.StreamHandler()
    handler.addFilter(_add_request_id)
    handler.setFormatter(_Json() if server.log_format == "json" else _Text())
    root = logging.getLogger()
    for other in root.handlers[:]:
        if isinstance(other.formatter, _Json | _Text):
            root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(server.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(shown_id)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        record.shown_id = f" [{request_id}]" if request_id else ""
        return super().format(record)


class _Json(JsonFormatter):
    """One object a line; what a caller passes as `extra` is in it."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in log_data.items() if value != ""}
