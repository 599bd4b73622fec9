"""One route: where it is, who may use it, and what it takes and answers."""

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
    """A route and who may use it, and what gateway.openapi says of it.

    Attributes:
        body: the struct that decodes the request.
        answer: the struct that describes the response, or its media type; None: a JSON object.
        streams: the response may be an event stream instead.
        events: the structs of that stream's data; None: they are not described.
        headers: that are read beside those of every route.
        failures: statuses that its scope and its body do not explain.
        anthropic_answer: the struct of the response to those who send the header anthropic-version, on a route that
            the API of Anthropic shares.
        query: the struct of its query parameters (see gateway.http.query); any other is refused. None: it answers the
            same whatever the query is.
        admitted: the limits of admission hold for it; its responses say what is left of them.
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
