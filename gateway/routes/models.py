"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.flow.requests import ModelEntryLike
from gateway.keys import MODELS
from gateway.responses import json_response
from gateway.routes.common import find_model


async def list_models(request: web.Request) -> web.StreamResponse:
    """Every name that a worker answers to now."""
    data = [_describe(name, entry) for entry in request.app[MODELS].models() for name in entry.names]
    return json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.StreamResponse:
    """One name; names may hold slashes."""
    name = request.match_info["model"]
    return json_response(_describe(name, find_model(request, name)))


def _describe(name: str, entry: ModelEntryLike) -> dict[str, Any]:
    facts = entry.facts
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "pelton",
        "root": entry.name,
        "parent": None,
        "max_model_len": facts.max_model_len,
    }
