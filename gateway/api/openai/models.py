"""GET /v1/models and /v1/models/{id}, in OpenAI's or in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.api.anthropic.errors import asks_anthropic
from gateway.api.anthropic.fields import VERSION_HEADER, check_versions
from gateway.api.anthropic.models import ModelsQuery, model_info, model_page
from gateway.api.common.fields import invalid
from gateway.api.common.prepare import find_model
from gateway.cluster.registry import ModelEntry
from gateway.http.app_keys import SERVICES
from gateway.http.errors import json_response
from gateway.http.route import query_of

_PAGE_PARAMETERS = ("limit", "after_id", "before_id")


async def list_models(request: web.Request) -> web.StreamResponse:
    """List every name of every served model; with the header anthropic-version, a page in Anthropic's shape."""
    entries = request.app[SERVICES].models.models()
    if asks_anthropic(request):
        check_versions(request.headers.getall(VERSION_HEADER))
        return json_response(model_page(entries, query_of(request, ModelsQuery)))
    for name in _PAGE_PARAMETERS:
        if name in request.query:
            raise invalid(name, f"requires the header {VERSION_HEADER}.")
    return json_response(
        {"object": "list", "data": [_describe(name, entry) for entry in entries for name in entry.names]}
    )


async def get_model(request: web.Request) -> web.StreamResponse:
    """Describe one model, whose name may contain slashes; with the header anthropic-version, in Anthropic's shape."""
    name = request.match_info["model"]
    if asks_anthropic(request):
        check_versions(request.headers.getall(VERSION_HEADER))
        return json_response(model_info(name, find_model(request, name)))
    return json_response(_describe(name, find_model(request, name)))


def _describe(name: str, entry: ModelEntry) -> dict[str, Any]:
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
