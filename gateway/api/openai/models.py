"""GET /v1/models and /v1/models/{id}, in the shape that the client knows."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.api.anthropic.errors import asks_anthropic
from gateway.api.anthropic.fields import VERSION_HEADER, check_versions
from gateway.api.anthropic.models import ModelsQuery, model_info, model_page
from gateway.api.common.submission import find_model
from gateway.flow.requests import ModelEntryLike
from gateway.http.app_keys import MODELS
from gateway.http.errors import json_response
from gateway.http.query import query_of
from shared.errors import InvalidRequestError

_OF_PAGES = ("limit", "after_id", "before_id")


async def list_models(request: web.Request) -> web.StreamResponse:
    """Every name that a worker answers to now; a page of Anthropic's where the header anthropic-version is sent."""
    entries = request.app[MODELS].models()
    if asks_anthropic(request):
        check_versions(request.headers.getall(VERSION_HEADER))
        return json_response(model_page(entries, query_of(request, ModelsQuery)))
    for name in _OF_PAGES:
        if name in request.query:
            raise InvalidRequestError(f"{name} goes with the header {VERSION_HEADER}.", param=name)
    return json_response(
        {"object": "list", "data": [_describe(name, entry) for entry in entries for name in entry.names]}
    )


async def get_model(request: web.Request) -> web.StreamResponse:
    """One name, which may hold slashes; in Anthropic's shape where the header anthropic-version is sent."""
    name = request.match_info["model"]
    if asks_anthropic(request):
        check_versions(request.headers.getall(VERSION_HEADER))
        return json_response(model_info(name, find_model(request, name)))
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
