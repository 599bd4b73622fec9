"""JSON bodies, error objects and headers of responses.

This module alone converts failures to the error object of OpenAI, or of another API.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from gateway.flow.admission import Room
from shared.errors import AuthenticationError, PeltonError, RateLimitError, RequestTimeoutError, UnavailableError

_STATUS_MESSAGES = {
    400: ("The HTTP request is malformed.", "bad_request"),
    405: ("This route does not support that method.", "method_not_allowed"),
    408: ("The request did not arrive in time.", "request_timeout"),
    413: ("The request body is too large.", "request_too_large"),
    417: ("The only supported expectation is 100-continue.", "expectation_failed"),
    431: ("The request line or a header is too large.", "headers_too_large"),
}
_MAX_SHOWN_METHOD = 32
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{what}" for what in ("requests", "tokens") for figure in ("limit", "remaining", "reset")
)
_UNSAFE = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def dump_json(value: object) -> bytes:
    """Encode a value as JSON on one line. U+0085, U+2028 and U+2029 are escaped for clients that use str.splitlines."""
    data = orjson.dumps(value)
    if data.isascii():
        return data
    # UTF-8 is self-synchronizing, so these bytes stand for these characters only, and they occur only in strings.
    for raw, escaped in _UNSAFE:
        data = data.replace(raw, escaped)
    return data


def cached_json(value: object) -> bytes:
    """Encode a value for storage in a bytes object of exactly its length.

    orjson's own bytes object keeps its write buffer, which may be 16 times larger.
    """
    return bytes(memoryview(dump_json(value)))


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a complete JSON response."""
    return web.Response(body=dump_json(value), status=status, content_type="application/json")


def error_object(error: PeltonError) -> dict[str, Any]:
    """Return OpenAI's error object with all four keys."""
    message = error.message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


ErrorShape = Callable[[PeltonError], tuple[int, dict[str, Any]]]
"""Conversion of an error to the status and the body of one API."""


def openai_error(error: PeltonError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body for an error; an ErrorShape."""
    return error.status, error_object(error)


class HttpError(PeltonError):
    """Failure that HTTP itself defines, such as a wrong method or a malformed request.

    Args:
        status: HTTP status.
        message: Message that replaces the default message of the status.
    """

    def __init__(self, status: int, message: str | None = None) -> None:
        unknown = ("The request failed.", "server_error" if status >= 500 else "bad_request")
        default, code = _STATUS_MESSAGES.get(status, unknown)
        super().__init__(message or default, code=code)
        self.status = status
        self.type = "server_error" if status >= 500 else "invalid_request_error"


def error_response(error: PeltonError, shape: ErrorShape = openai_error) -> web.Response:
    """Return a complete response for a failure before the first byte."""
    status, body = shape(error)
    response = json_response(body, status)
    if isinstance(error, RateLimitError | UnavailableError):
        seconds = max(0.0, error.retry_after)
        response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
        response.headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
    if isinstance(error, RequestTimeoutError):
        # The rest of the body may still arrive and must not be parsed as another request.
        response.force_close()
    if isinstance(error, AuthenticationError):
        response.headers["WWW-Authenticate"] = 'Bearer realm="pelton"'
    return response


def rate_limit_headers(sequences: Room, prompt_tokens: Room) -> dict[str, str]:
    """Return the admission limits as the x-ratelimit headers of OpenAI's API (a reset looks like `6m0s`).

    OpenAI counts per minute. Here `requests` counts choices that run or wait, and `tokens` counts tokens of waiting
    prompts.
    """
    values = []
    for room in (sequences, prompt_tokens):
        minutes, seconds = divmod(math.ceil(room.reset), 60)
        values += [str(room.limit), str(room.remaining), f"{minutes}m{seconds}s" if minutes else f"{seconds}s"]
    return dict(zip(RATE_LIMIT_HEADERS, values, strict=True))


def http_exception_response(error: web.HTTPException, shape: ErrorShape = openai_error) -> web.Response:
    """Return a complete response for an exception of aiohttp. Keeps the Allow header of a 405."""
    message = None
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " and ".join(sorted(error.allowed_methods))
        message = f"This route supports {allowed}, not {error.method[:_MAX_SHOWN_METHOD]}."
    response = error_response(HttpError(error.status, message), shape)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
