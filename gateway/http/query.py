"""Query parameters, as strictly typed as bodies: an unknown one, one given twice and one of a wrong type are refused.

A route's parameters are the fields of a struct. gateway.middleware refuses what the struct does not take, before the
route runs; the route has them from `query_of`. Fields are strings, literals of strings, integers or booleans, each
with a description in its `msgspec.Meta`. A query cannot say null: what may be left out and has no default is
`msgspec.UNSET`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import inspect
from multidict import MultiMapping

from gateway.http.app_keys import QUERY
from gateway.http.convert import convert
from shared.errors import InvalidRequestError

_MAX_SHOWN = 64
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_BOOLEANS: dict[str, bool | str] = {"true": True, "false": False}


class NoQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """No parameter."""


class BetaQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What Anthropic's clients send where features are used that it calls beta."""

    beta: Annotated[bool, msgspec.Meta(description="Changes nothing: there is one version of each route.")] = False


Query = TypeVar("Query", bound=msgspec.Struct)


def query_of(request: web.BaseRequest, kind: type[Query]) -> Query:
    """The parameters of a request, parsed when they are first asked for. Raises InvalidRequestError as parse_query."""
    known = request.get(QUERY)
    if isinstance(known, kind):
        return known
    request[QUERY] = parsed = parse_query(request.query, kind)
    return parsed


def parse_query(query: MultiMapping[str], kind: type[Query]) -> Query:
    """The parameters of a request. Raises InvalidRequestError naming the first at fault."""
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
    """The type of each parameter."""
    found = cast(inspect.StructType, inspect.type_info(kind))
    return {
        field.encode_name: field.type.type if isinstance(field.type, inspect.Metadata) else field.type
        for field in found.fields
    }


def _value(text: str, kind: inspect.Type) -> object:
    """What the text stands for; itself where it is not of this type, so that converting it names the fault."""
    if isinstance(kind, inspect.BoolType):
        return _BOOLEANS.get(text, text)
    if isinstance(kind, inspect.IntType) and _INTEGER.fullmatch(text):
        return int(text)
    return text
