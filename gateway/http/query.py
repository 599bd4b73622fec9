"""Query parameters, as strictly typed as bodies: unknown, repeated and mistyped parameters are refused.

The parameters of a route are the fields of a struct. gateway.middleware refuses parameters that the struct does not
have before the route runs, and the route reads them with `query_of`. Fields are strings, literals of strings, integers
or booleans, each with a description in its `msgspec.Meta`. A query cannot express null: an optional parameter without
a default is `msgspec.UNSET`.
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
    """Query without parameters."""


class BetaQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Query of Anthropic's clients when they use features that Anthropic calls beta."""

    beta: Annotated[bool, msgspec.Meta(description="Has no effect: each route has one version.")] = False


Query = TypeVar("Query", bound=msgspec.Struct)


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
