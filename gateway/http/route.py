"""Description of a route, and its query parameters, which are as strictly typed as bodies.

The parameters of a route are the fields of a struct. gateway.middleware refuses parameters that the struct does not
have before the route runs, and the route reads them with `query_of`. Fields are strings, literals of strings, integers
or booleans, each with a description in its `msgspec.Meta`. A query cannot express null: an optional parameter without a
default is `msgspec.UNSET`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import inspect
from multidict import MultiMapping

from gateway.http.app_keys import QUERY
from gateway.http.auth import Scope
from gateway.http.body import convert
from shared.errors import InvalidRequestError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Query = TypeVar("Query", bound=msgspec.Struct)

_MAX_SHOWN = 64
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_BOOLEANS: dict[str, bool | str] = {"true": True, "false": False}


class NoQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Query without parameters."""


class BetaQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Query of Anthropic's clients when they use features that Anthropic calls beta."""

    beta: Annotated[bool, msgspec.Meta(description="Has no effect: each route has one version.")] = False


@dataclass(frozen=True, slots=True)
class Route:
    """A route, the scope it requires, and its description for gateway.openapi.

    Attributes:
        method: HTTP method.
        path: Path pattern of aiohttp.
        handler: Coroutine function that answers the request.
        answer: Struct that describes the response, or its media type; None for any JSON object.
        body: Struct that decodes the request body.
        scope: Scope that the API key must have.
        streams: True if the response may be an event stream instead.
        events: Structs of the stream's data; None if they are not described.
        headers: Request headers that the route reads besides those of every route.
        failures: Statuses that do not follow from the scope and the body.
        anthropic_answer: Struct of the response to clients that send the header anthropic-version, on routes that
            both APIs share.
        query: Struct of the query parameters (see gateway.http.route); others are refused. None accepts and ignores
            any query.
        admitted: True if admission limits apply; the response headers then contain what is left of them.
    """

    method: str
    path: str
    handler: Handler
    answer: type[msgspec.Struct] | str | None = None
    body: type[msgspec.Struct] | None = None
    scope: Scope = field(kw_only=True)
    streams: bool = False
    events: UnionType | None = None
    headers: tuple[str, ...] = ()
    failures: tuple[int, ...] = ()
    anthropic_answer: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = NoQuery
    admitted: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods under which the route is registered."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


def query_of(request: web.BaseRequest, kind: type[Query]) -> Query:
    """Return the parameters of a request, parsed at the first call. Raises the errors of parse_query."""
    known = request.get(QUERY)
    if isinstance(known, kind):
        return known
    request[QUERY] = parsed = parse_query(request.query, kind)
    return parsed


def parse_query(query: MultiMapping[str], kind: type[Query]) -> Query:
    """Parse the parameters of a request.

    Raises:
        InvalidRequestError: A parameter is invalid; the error names the first one.
    """
    types = _types(kind)
    values: dict[str, Any] = {}
    for name, text in query.items():
        shown = name[:_MAX_SHOWN]
        if name not in types:
            message = f"Unknown query parameter: {shown!r}."
            raise InvalidRequestError(message, param=shown, code="unknown_parameter")
        if name in values:
            message = f"The query parameter {shown!r} is given more than once."
            raise InvalidRequestError(message, param=shown, code="duplicate_parameter")
        values[name] = _value(text, types[name])
    return convert(values, kind)


@lru_cache(64)
def _types(kind: type[msgspec.Struct]) -> Mapping[str, inspect.Type]:
    """Return the type of each parameter."""
    found = cast(inspect.StructType, inspect.type_info(kind))
    return {
        field.encode_name: field.type.type if isinstance(field.type, inspect.Metadata) else field.type
        for field in found.fields
    }


def _value(text: str, kind: inspect.Type) -> object:
    """Convert text to a type.

    Return the text itself if it does not match, so that the conversion of the struct reports the error.
    """
    if isinstance(kind, inspect.BoolType):
        return _BOOLEANS.get(text, text)
    if isinstance(kind, inspect.IntType) and _INTEGER.fullmatch(text):
        return int(text)
    return text
