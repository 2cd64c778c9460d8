"""Every error that a client of the HTTP API can see, and the body it comes in.

The official clients repeat what was answered with 408, 409, 429 or 5xx, so a client's own mistake
is never one of those.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

MAX_MESSAGE_CHARACTERS = 1000
_MAX_SHOWN_CHARACTERS = 40
_MAX_PARAM_CHARACTERS = 200


class ApiError(Exception):
    """An answer that is an error. `param` names the field of the request that is to blame."""

    status = 500
    kind = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARACTERS]
        self.param = None if param is None else param[:_MAX_PARAM_CHARACTERS]
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequestError(ApiError):
    """The client has to change something."""

    status = 400
    kind = "invalid_request_error"


class AuthenticationError(ApiError):
    status = 401
    kind = "authentication_error"


class NotFoundError(ApiError):
    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(ApiError):
    status = 405
    kind = "invalid_request_error"


class BodyTooLargeError(ApiError):
    status = 413
    kind = "invalid_request_error"


class TooManyRequestsError(ApiError):
    """Too much is waiting already; the same request may pass later."""

    status = 429
    kind = "rate_limit_error"


class InternalError(ApiError):
    """A fault of ours, which concerns this request alone."""


class UnavailableError(ApiError):
    """No token can be made now."""

    status = 503
    kind = "service_unavailable_error"


_WRONG_TYPE = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
}


def our_fault() -> InternalError:
    """For what nobody foresaw."""
    return InternalError("The server made a mistake; its log tells more.")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The form of every error."""

    error: ErrorDetail


def from_validation(details: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """The first of pydantic's complaints about a request body, in words.

    Numbers that were sent are shown, texts are not: they may be long, or private.
    """
    detail = details[0]
    if detail["type"] == "json_invalid":
        position, problem = detail["loc"][-1], detail["ctx"]["error"]
        return InvalidRequestError(
            f"The request body is no valid JSON: {problem}, at character {position}."
        )
    if isinstance(detail.get("input"), bytes):
        return InvalidRequestError("The request needs the header Content-Type: application/json.")
    path = [part for part in detail["loc"] if not _is_internal(part)]
    param = ".".join(map(str, path)) or None
    problem = _problem(str(detail["type"]), detail)
    more = f" (and {len(details) - 1} more problems)" if len(details) > 1 else ""
    return InvalidRequestError(f"{param or 'The request'} {problem}{more}.", param=param)


def _is_internal(part: object) -> bool:
    """Parts of a location that are no part of the request: where it stood, and type tags."""
    return isinstance(part, str) and (part == "body" or part.startswith("#"))


def _problem(kind: str, detail: Mapping[str, Any]) -> str:
    context = detail.get("ctx") or {}
    value = detail.get("input")
    shown = f", not {_show(value)}" if isinstance(value, int | float) else ""
    if kind in _WRONG_TYPE:
        return f"must be {_WRONG_TYPE[kind]}{shown}"
    match kind:
        case "missing":
            return "is missing"
        case "greater_than_equal":
            return f"must be at least {context['ge']}{shown}"
        case "greater_than":
            return f"must be more than {context['gt']}{shown}"
        case "less_than_equal":
            return f"must be at most {context['le']}{shown}"
        case "less_than":
            return f"must be less than {context['lt']}{shown}"
        case "too_long" | "string_too_long":
            what = "characters" if kind == "string_too_long" else "entries"
            return f"may have at most {context['max_length']} {what}"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "string_unicode" | "not_unicode":
            return "holds half of a surrogate pair, which is no text"
        case "too_many_parts":
            return f"have {detail['msg']}"
        case "finite_number":
            return "must be a finite number"
        case "literal_error":
            return f"must be {context['expected']}"
    return f"is wrong: {str(detail.get('msg', kind))[:200]}"


def _show(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def from_status(status: int, detail: str, path: str) -> ApiError:
    """What the web framework refuses on its own."""
    match status:
        case 400:  # of a body; all else that is wrong in one is told by `from_validation`
            return InvalidRequestError(
                "The request body cannot be read: it must be JSON in UTF-8, without numbers of "
                "thousands of digits, and nested at most some hundred levels deep."
            )
        case 404:
            return NotFoundError(f"There is nothing at {path[:100]}.")
        case 405:
            return MethodNotAllowedError(f"{path[:100]} does not take this method.")
        case 413:
            return BodyTooLargeError(detail)
    return InvalidRequestError(detail) if status < 500 else InternalError(detail)
