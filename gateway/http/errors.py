"""Bodies and headers that every route shares. The one place that turns a failure into OpenAI's error object,
or into a response with another API's."""

from __future__ import annotations

import math
from typing import Any, Protocol

import orjson
from aiohttp import web

from gateway.flow.admission import Room
from shared.errors import AuthenticationError, PeltonError, RateLimitError, RequestTimeoutError, UnavailableError

_STATUS_MESSAGES = {
    400: ("The HTTP request is malformed.", "bad_request"),
    405: ("This route does not take that method.", "method_not_allowed"),
    408: ("The request did not arrive in time.", "request_timeout"),
    413: ("The request body is too large.", "request_too_large"),
    417: ("Only the expectation 100-continue can be met.", "expectation_failed"),
    431: ("The request line or a header is too large.", "headers_too_large"),
}
_MAX_SHOWN_METHOD = 32
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{what}" for what in ("requests", "tokens") for figure in ("limit", "remaining", "reset")
)
_UNSAFE = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def dump_json(value: object) -> bytes:
    """JSON on one line, also for clients that use str.splitlines: U+0085, U+2028 and U+2029 are escaped."""
    data = orjson.dumps(value)
    if data.isascii():
        return data
    # UTF-8 is self-synchronizing, so these bytes are nothing but these characters, and they occur in strings alone.
    for raw, escaped in _UNSAFE:
        data = data.replace(raw, escaped)
    return data


def kept_json(value: object) -> bytes:
    """The same for what is kept a while: orjson's own bytes hold the buffer that they were written to, of 4 KB or more,
    up to sixteen times their length.
    """
    return bytes(memoryview(dump_json(value)))


def json_response(value: object, status: int = 200) -> web.Response:
    """A whole response."""
    return web.Response(body=dump_json(value), status=status, content_type="application/json")


def error_object(error: PeltonError) -> dict[str, Any]:
    """OpenAI's error object; all four keys are there."""
    message = error.message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


class ErrorBodies(Protocol):
    """How an API says what failed."""

    def of_error(self, error: PeltonError) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        ...

    def of_status(self, status: int, message: str | None = None) -> dict[str, Any]:
        """The body for a failure that HTTP itself defines, with another message than its own where there is one."""
        ...


class _OpenAIErrors:
    def of_error(self, error: PeltonError) -> tuple[int, dict[str, Any]]:
        return error.status, error_object(error)

    def of_status(self, status: int, message: str | None = None) -> dict[str, Any]:
        return status_error_object(status, message)


OPENAI_ERRORS: ErrorBodies = _OpenAIErrors()


def error_response(error: PeltonError, bodies: ErrorBodies = OPENAI_ERRORS) -> web.Response:
    """A whole response for a failure before the first byte."""
    status, body = bodies.of_error(error)
    response = json_response(body, status)
    if isinstance(error, RateLimitError | UnavailableError):
        seconds = max(0.0, error.retry_after)
        response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
        response.headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
    if isinstance(error, RequestTimeoutError):
        # The rest of the body may still come; it must not be taken for another request.
        response.force_close()
    if isinstance(error, AuthenticationError):
        response.headers["WWW-Authenticate"] = 'Bearer realm="pelton"'
    return response


def rate_limit_headers(sequences: Room, prompt_tokens: Room) -> dict[str, str]:
    """What admission leaves, in the headers of OpenAI's API reference (a reset is like `6m0s`).

    OpenAI counts by the minute; here `requests` are choices that run or wait, and `tokens` those of waiting prompts.
    """
    values = []
    for room in (sequences, prompt_tokens):
        minutes, seconds = divmod(math.ceil(room.reset), 60)
        values += [str(room.limit), str(room.remaining), f"{minutes}m{seconds}s" if minutes else f"{seconds}s"]
    return dict(zip(RATE_LIMIT_HEADERS, values, strict=True))


def status_error_object(status: int, message: str | None = None) -> dict[str, Any]:
    """The error object for a failure that HTTP itself defines (wrong method, malformed request)."""
    usual, code = _STATUS_MESSAGES.get(
        status, ("The request failed.", "server_error" if status >= 500 else "bad_request")
    )
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message or usual, "type": kind, "param": None, "code": code}}


def status_error_response(status: int) -> web.Response:
    """A whole response for such a failure."""
    return json_response(status_error_object(status), status)


def http_exception_response(error: web.HTTPException, bodies: ErrorBodies = OPENAI_ERRORS) -> web.Response:
    """The same for an exception of aiohttp's; keeps the Allow header of a 405."""
    message = None
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " and ".join(sorted(error.allowed_methods))
        message = f"This route takes {allowed}, not {error.method[:_MAX_SHOWN_METHOD]}."
    response = json_response(bodies.of_status(error.status, message), error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
