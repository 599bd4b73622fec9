"""Subset of JSON Schema that OpenAI supports with `strict` (OpenAI's guide "Structured outputs", "Supported schemas").

Every object lists all its properties and allows no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.text.grammars.json_schema import MAX_NODES
from shared.errors import InvalidRequestError

_REFUSED = frozenset(
    {
        *("allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems", "contains"),
        *("minContains", "maxContains", "uniqueItems", "prefixItems", "additionalItems"),
    }
)
_MAPS = ("properties", "$defs", "definitions")


def check_strict(schema: Mapping[str, Any], place: str) -> None:
    """Check a schema as OpenAI does. Raises InvalidRequestError, with `place` as its parameter."""
    root_type = schema.get("type")
    if "anyOf" in schema or ("$ref" not in schema and root_type != "object"):
        raise _error(place, "", 'with strict, the schema itself must have type "object" and no anyOf')
    nodes: list[tuple[Any, str]] = [(schema, "")]
    num_nodes = 0
    while nodes:
        node, path = nodes.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise _error(place, "", f"it has more than {MAX_NODES} schemas")
        if isinstance(node, dict):
            _check_node(node, place, path)
            nodes.extend((child, path + step) for child, step in _children(node))


def is_strict(schema: object) -> bool:
    """Return True if OpenAI supports this schema with `strict`."""
    if not isinstance(schema, dict):
        return False
    try:
        check_strict(schema, "")
    except InvalidRequestError:
        return False
    return True


def _check_node(node: Mapping[str, Any], place: str, path: str) -> None:
    if refused := sorted(_REFUSED.intersection(node)):
        raise _error(place, path, f"with strict, {refused[0]} is not allowed")
    kinds = node.get("type")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds) and "properties" not in node:
        return
    if node.get("additionalProperties") is not False:
        raise _error(place, path, "with strict, each object must have additionalProperties: false")
    properties = node.get("properties", {})
    required = node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    listed = {name for name in required if isinstance(name, str)}
    missing = [name for name in properties if name not in listed]
    if missing:
        name = missing[0][:64]
        raise _error(place, path, f"with strict, required must list every property; {name!r} is missing")


def _children(node: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    for name in _MAPS:
        if isinstance(value := node.get(name), dict):
            yield from ((child, f".{name}.{key[:64]}") for key, child in value.items())
    if isinstance(value := node.get("anyOf"), list):
        yield from ((child, f".anyOf[{index}]") for index, child in enumerate(value))
    if "items" in node:
        yield node["items"], ".items"


def _error(place: str, path: str, what: str) -> InvalidRequestError:
    where = f" (at {place}{path})" if path else ""
    return InvalidRequestError(f"{place} cannot be used: {what}{where}.", param=place, code="invalid_json_schema")
