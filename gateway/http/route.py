"""Description of a route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import UnionType

import msgspec
from aiohttp import web

from gateway.http.auth import Scope
from gateway.http.query import NoQuery

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route, the scope it requires, and its description for gateway.openapi.

    Attributes:
        method: HTTP method.
        path: Path pattern of aiohttp.
        handler: Coroutine function that answers the request.
        scope: Scope that the API key must have.
        body: Struct that decodes the request body.
        answer: Struct that describes the response, or its media type; None for any JSON object.
        streams: True if the response may be an event stream instead.
        events: Structs of the stream's data; None if they are not described.
        headers: Request headers that the route reads besides those of every route.
        failures: Statuses that do not follow from the scope and the body.
        anthropic_answer: Struct of the response to clients that send the header anthropic-version, on routes that
            both APIs share.
        query: Struct of the query parameters (see gateway.http.query); others are refused. None accepts and ignores
            any query.
        admitted: True if admission limits apply; the response headers then contain what is left of them.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str | None = None
    streams: bool = False
    events: UnionType | None = None
    headers: tuple[str, ...] = ()
    failures: tuple[int, ...] = ()
    anthropic_answer: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = NoQuery
    admitted: bool = False
