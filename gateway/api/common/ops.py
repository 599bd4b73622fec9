"""GET /health, /ready, /version and /metrics."""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache

from aiohttp import web

from gateway.http.app_keys import DRAIN, EXPOSITION, MODELS
from gateway.http.errors import json_response
from shared.errors import UnavailableError


async def health(request: web.Request) -> web.StreamResponse:
    """The process lives; says nothing of workers, so that a supervisor does not restart a gateway for them."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.StreamResponse:
    """Whether a generation sent now would be served."""
    if request.app[DRAIN].draining:
        raise UnavailableError("The server is shutting down.", retry_after=1.0, code="not_ready")
    is_ready, reason = request.app[MODELS].ready()
    if not is_ready:
        raise UnavailableError(reason, retry_after=1.0, code="not_ready")
    return json_response({"status": "ready"})


async def version(request: web.Request) -> web.StreamResponse:
    """Pelton's version, and of nothing else: what lies under it would tell an attacker which holes to try."""
    return json_response({"version": _version()})


@lru_cache(1)
def _version() -> str:
    return importlib.metadata.version("pelton")


async def metrics(request: web.Request) -> web.StreamResponse:
    """Prometheus text format."""
    body = await request.app[EXPOSITION].render()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
