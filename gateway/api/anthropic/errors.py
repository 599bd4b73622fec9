"""What fails on the paths of Anthropic's API, in its words: types, status codes, names of fields."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from gateway.api.anthropic.fields import NO_THREADS, VERSION_HEADER
from gateway.http.app_keys import REQUEST_ID
from gateway.http.errors import OPENAI_ERRORS, ErrorBodies, status_error_object
from shared.errors import PeltonError, UnavailableError

PATH = "/v1/messages"
SHARED_PATH = "/v1/models"
"""Here a client of Anthropic's is told by its header, which OpenAI's never send."""
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
    (re.compile(r"\bcontinue_final_message\b"), "a last message of the assistant"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
"""How the fields of a chat request are called here."""


def error_bodies(request: web.BaseRequest) -> ErrorBodies:
    """How the API that a request is of says what failed."""
    return AnthropicErrors(request[REQUEST_ID]) if asks_anthropic(request) else OPENAI_ERRORS


def asks_anthropic(request: web.BaseRequest) -> bool:
    """Whether a request is of Anthropic's API."""
    return is_anthropic(request.path) or (VERSION_HEADER in request.headers and _is_below(request.path, SHARED_PATH))


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API, whether or not there is such a route."""
    return _is_below(path, PATH)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


class AnthropicErrors:
    """See gateway.http.errors.ErrorBodies."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def of_error(self, error: PeltonError) -> tuple[int, dict[str, Any]]:
        status = OVERLOADED if isinstance(error, UnavailableError) else error.status
        body = self._body(status, _message(error))
        if error.code == NO_THREADS:
            body["error"]["details"] = {"error_code": NO_THREADS}
        return status, body

    def of_status(self, status: int, message: str | None = None) -> dict[str, Any]:
        return self._body(status, status_error_object(status, message)["error"]["message"])

    def _body(self, status: int, message: str) -> dict[str, Any]:
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": self._request_id}


def _message(error: PeltonError) -> str:
    """There is no field for the parameter at fault: it is in the message."""
    message = error.message.encode("utf-8", "replace").decode()
    if error.param is None:
        return message
    param = error.param
    if error.code not in ("unknown_parameter", "invalid_json"):  # these have names of the client's own
        for pattern, name in _NAMES:
            param, message = pattern.sub(name, param), pattern.sub(name, message)
    return message if param in message else f"{param}: {message}"
