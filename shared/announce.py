"""Announcement of `pelton serve` when the server is ready: its URL and a command to try."""

from __future__ import annotations

import http.client
import json
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from shared import notify
from shared.settings import ServeSettings

_POLL_SECONDS = 0.1
_REQUEST_SECONDS = 2.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def announce_when_ready(
    settings: ServeSettings, stopped: threading.Event, listening: Callable[[], bool] = lambda: True
) -> None:
    """Poll /ready until it answers 200, then print the URL and a curl command. Return early when `stopped` is set.

    Args:
        settings: Settings of the server.
        stopped: Event that ends the polling.
        listening: Function that tells whether our own gateway holds the port; before that, another server might
            answer.
    """
    while not stopped.wait(_POLL_SECONDS):
        if listening() and _get(settings, "/ready", {}) is not None:
            print(greeting(settings, _model_name(settings)), flush=True)
            notify.ready(f"serving on {base_url(settings)}")
            return


def base_url(settings: ServeSettings) -> str:
    """Return the base_url for an OpenAI SDK on this machine."""
    host = _reachable_host(settings)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}/v1"


def greeting(settings: ServeSettings, model: str) -> str:
    """Return the lines to print, which never contain keys."""
    question = {"role": "user", "content": "Tell me a joke."}
    # At the API's default temperature, 1, the first answer of a small model would be nonsense.
    body = json.dumps({"model": model, "messages": [question], "stream": True, "max_tokens": 64, "temperature": 0.7})
    command = ["curl", "-N", f"{base_url(settings)}/chat/completions", "-H", "Content-Type: application/json"]
    key = ' -H "Authorization: Bearer $PELTON_API_KEY"' if settings.api_key or settings.api_key_file else ""
    return (
        f"\nPelton serves {model} at {base_url(settings)}\n"
        f"A page for chat and status is at {base_url(settings).removesuffix('v1')}\n"
        f"Try it:\n\n  {shlex.join(command)}{key} \\\n    -d {shlex.quote(body)}\n"
    )


def _model_name(settings: ServeSettings) -> str:
    if settings.served_model_name:
        return settings.served_model_name[0]
    key = settings.api_key[0] if settings.api_key else _first_key(settings.api_key_file)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        name = json.loads(_get(settings, "/v1/models", headers) or b"")["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        return "default"
    return str(name)


def _first_key(path: str) -> str:
    """Return the first key of --api-key-file that may request /v1/models, or nothing.

    The gateway reports a bad file.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines() if path else []
    except (OSError, UnicodeDecodeError):
        return ""
    words = (line.split() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return next((first for first, *rest in words if "scope=admin" not in rest), "")


def _reachable_host(settings: ServeSettings) -> str:
    return _ANY_ADDRESS.get(settings.host, settings.host)


def _get(settings: ServeSettings, path: str, headers: Mapping[str, str]) -> bytes | None:
    """Return the body of a 200 response, else None."""
    connection = http.client.HTTPConnection(_reachable_host(settings), settings.port, timeout=_REQUEST_SECONDS)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read()
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
