"""Errors of Anthropic's API: types, status codes and field names."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from aiohttp import web

from gateway.api.anthropic.fields import NO_THREADS, VERSION_HEADER
from gateway.http.app_keys import REQUEST_ID
from gateway.http.errors import ErrorShape, openai_error
from shared.errors import PeltonError, UnavailableError

PATH = "/v1/messages"
SHARED_PATH = "/v1/models"
"""Path that both APIs have. Anthropic's clients send a version header there, and OpenAI's never do."""
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_NAMES = (
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"\bparallel_tool_calls\b"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"\bthinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"\bcontinue_final_message\b"), "continuing the last assistant message"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
"""Patterns of chat's field names, and their replacements in Anthropic's API."""


def error_shape(request: web.BaseRequest) -> ErrorShape:
    """Return the shape of errors in the API that a request belongs to."""
    return partial(_anthropic_error, request[REQUEST_ID]) if asks_anthropic(request) else openai_error


def asks_anthropic(request: web.BaseRequest) -> bool:
    """Return True if a request belongs to Anthropic's API."""
    return is_anthropic(request.path) or (VERSION_HEADER in request.headers and _is_below(request.path, SHARED_PATH))


def is_anthropic(path: str) -> bool:
    """Return True if a path belongs to Anthropic's API, even if no such route exists."""
    return _is_below(path, PATH)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _anthropic_error(request_id: str, error: PeltonError) -> tuple[int, dict[str, Any]]:
    status = OVERLOADED if isinstance(error, UnavailableError) else error.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.code == NO_THREADS:
        body["details"] = {"error_code": NO_THREADS}
    return status, {"type": "error", "error": body, "request_id": request_id}


def _message(error: PeltonError) -> str:
    """Return a message that names the invalid parameter, because Anthropic's errors have no field for it."""
    message = error.message.encode("utf-8", "replace").decode()
    if error.param is None:
        return message
    param = error.param
    if error.code not in ("unknown_parameter", "invalid_json"):  # they contain names that the client chose
        for pattern, name in _NAMES:
            param, message = pattern.sub(name, param), pattern.sub(name, message)
    return message if param in message else f"{param}: {message}"
