"""/openapi.json: description of the API as OpenAPI 3.1, from the route table and the structs that decode requests."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.anthropic.answers import AnthropicErrorAnswer
from gateway.api.anthropic.errors import OVERLOADED, is_anthropic
from gateway.api.anthropic.fields import VERSION_HEADER
from gateway.api.openai.answers import ErrorAnswer
from gateway.http.auth import Scope
from gateway.http.errors import dump_json
from gateway.http.route import Route

ROUTE_TABLE = web.AppKey[Sequence[Route]]("ROUTE_TABLE")

_REFERENCE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_STREAM = "text/event-stream"
_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The scope of the key, or the Host header, does not allow the request.",
    404: "This key has no object with this name.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not uncompressed JSON.",
    429: "A limit is reached; Retry-After says when to try again.",
    500: "The server failed.",
    503: "No worker can take the request; Retry-After says when to try again.",
    OVERLOADED: "No worker can take the request; Retry-After says when to try again.",
}
_ALWAYS = (400, 403, 500)
_WITH_KEY = (401, 429, 503)
_WITH_BODY = (404, 408, 413, 415)


async def openapi(request: web.Request) -> web.StreamResponse:
    """Answer with the OpenAPI document."""
    routes: Sequence[Route] = request.app[ROUTE_TABLE]
    return web.Response(body=_document(tuple(routes)), content_type="application/json")


@lru_cache(4)
def _document(routes: tuple[Route, ...]) -> bytes:
    return dump_json(describe(routes))


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the document: every route with its scope, parameters, body and responses."""
    routes = list(routes)
    structs: list[Any] = [ErrorAnswer, AnthropicErrorAnswer]
    for route in routes:
        kinds = (route.body, route.answer, route.anthropic_answer, route.events)
        structs += [kind for kind in kinds if kind is not None and not isinstance(kind, str)]
    schemas, components = msgspec.json.schema_components(dict.fromkeys(structs), ref_template=_REFERENCE)
    of_struct = dict(zip(dict.fromkeys(structs), schemas))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, of_struct)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pelton", "version": importlib.metadata.version("pelton")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": (inspect.getdoc(route.handler) or route.path).split("\n\n")[0].replace("\n", " "),
        "x-scope": route.scope.value,
        "security": [] if route.scope is Scope.PUBLIC else [{}, {"key": []}],
        "responses": _responses(route, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(route.path)
    ]
    headers = route.headers if route.anthropic_answer is None else (*route.headers, VERSION_HEADER)
    parameters += [{"name": name, "in": "header", "schema": {"type": "string"}} for name in headers]
    parameters += _query_parameters(route)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    _, components = msgspec.json.schema_components([route.query], ref_template=_REFERENCE)
    (struct,) = components.values()
    return [
        {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
        for name, schema in struct["properties"].items()
    ]


def _json(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a response that is JSON of one of the schemas, or any JSON."""
    if len(schemas) < 2:
        return {"application/json": {"schema": schemas[0]} if schemas else {}}
    return {"application/json": {"schema": {"anyOf": list(schemas)}}}


def _responses(route: Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if isinstance(route.answer, str):
        content: dict[str, Any] = {route.answer: {}}
    else:
        content = _json([schemas[kind] for kind in (route.answer, route.anthropic_answer) if kind is not None])
    if route.streams:
        # OpenAPI 3.1 cannot describe the events of a stream.
        content[_STREAM] = {} if route.events is None else {"x-event-data": schemas[route.events]}
    responses: dict[str, Any] = {"200": {"description": "The requested object.", "content": content}}
    if route.answer == _STREAM or (route.streams and route.method == "GET"):
        responses["204"] = {"description": "No content."}
    statuses = {*_ALWAYS, *route.failures}
    if route.scope is not Scope.PUBLIC:
        statuses.update(_WITH_KEY)
    if route.body is not None or route.method == "POST":
        statuses.update(_WITH_BODY)
    if "{" in route.path:
        statuses.add(404)
    failed: list[type[msgspec.Struct]] = [ErrorAnswer]
    if is_anthropic(route.path):
        failed = [AnthropicErrorAnswer]
        statuses = {OVERLOADED if status == 503 else status for status in statuses}
    elif route.anthropic_answer is not None:
        failed = [ErrorAnswer, AnthropicErrorAnswer]
        statuses.add(OVERLOADED)
    failure = _json([schemas[kind] for kind in failed])
    for status in sorted(statuses):
        responses[str(status)] = {"description": _STATUSES[status], "content": failure}
    return responses
