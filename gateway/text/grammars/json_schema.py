"""Conversion of JSON schemas to grammars that llguidance enforces.

A weak model fills everything that a schema leaves open up to max_tokens: white space and digits. Both are bounded
here:

- Between two tokens there is at most one space, or one line break with up to INDENT spaces.
- A text of a format with an unbounded part (fractions of a second) has a maximum length.
- A number has up to 15 digits before its point and NUM_DECIMALS after it, and no exponent, unless the bounds or
`multipleOf` of the schema require more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.text.grammars.regex_size import check_size
from shared.errors import InvalidRequestError

INDENT = 20
"""Maximum number of spaces after a line break."""
MAX_NUMBER = 10**15 - 1
NUM_DECIMALS = 9
MAX_DEPTH = 64
"""Maximum nesting of schemas; llguidance supports about 60."""
MAX_NODES = 20_000

WHITESPACE = rf" |\n {{0,{INDENT}}}"

ESCAPES = 'nrbtf\\"'
r"""Characters that may follow a backslash if a schema names no control characters.

With `u` a model could write the name of a property as `\u0061`, which llguidance takes for an additional property
without constraints.
"""
_CONTROL = re.compile(r"\\u00[01]|\x7f")
"""Control character without a shorter escape, in JSON text."""

FORMAT_LENGTHS = {"time": 32, "date-time": 48, "duration": 48, "email": 254, "hostname": 253, "uri": 2048}

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("additionalProperties", "additionalItems", "items")
_UNBOUNDED = ("contains", "else", "if", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")
"""Keywords with one schema each that llguidance does not support."""
_COMBINED = ("anyOf", "oneOf", "$ref")
_FIXED = (*_COMBINED, "allOf", "enum", "const")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
)
"""Keywords without constraints. They are left out, so that grammars are small and equal."""
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "minProperties": (0,),
}
"""Values with which keywords constrain nothing although llguidance refuses the keyword; zod writes the last
propertyNames for every map.
"""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_CONSTRAINTS = frozenset(
    {
        *("type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "items"),
        *("prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties", "additionalItems"),
    }
)
_NOT_STRICT = frozenset(
    {
        *("allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems", "contains"),
        *("minContains", "maxContains", "uniqueItems", "prefixItems", "additionalItems"),
    }
)
"""Keywords outside the subset of JSON Schema that OpenAI supports with `strict`."""


def json_expression(
    schema: Mapping[str, Any],
    place: str,
    *,
    whitespace: str | None = None,
    close_objects: bool = False,
    lenient: bool = False,
) -> str:
    """Return an expression for JSON text that satisfies the schema, as the right side of a rule.

    Args:
        schema: The schema.
        place: Request field that contains the schema.
        whitespace: Regular expression for one occurrence of white space where JSON allows it; "" for none.
        close_objects: Objects whose schema does not mention additional properties have none.
        lenient: Leave out what llguidance cannot enforce; otherwise llguidance refuses the grammar.

    Raises:
        InvalidRequestError: The schema is invalid or too large. Unsupported keywords are found by llguidance
            later.
    """
    if "x-guidance" in schema:
        message = f"{place}.x-guidance is not supported: send structured_outputs.whitespace_pattern instead."
        raise InvalidRequestError(message, param=place)
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
    if whitespace == "":
        options = {"whitespace_flexible": False}
    if lenient:
        options["lenient"] = True
    if not _CONTROL.search(json.dumps(schema, ensure_ascii=False)):
        options["json_allowed_escapes"] = ESCAPES
    bounded = _Bounder(place, _is_simple(schema, place), close_objects=close_objects).whole(schema)
    return f"%json {json.dumps({**bounded, 'x-guidance': options})}"


def walk(schema: object, place: str) -> Iterator[tuple[Any, str]]:
    """Yield each schema in a schema, itself included, with its path from there.

    Raises:
        InvalidRequestError: There are too many, or they are nested too deep; the error names `place`.
    """
    num_nodes = 0
    nodes: list[tuple[Any, str, int]] = [(schema, "", 0)]
    while nodes:
        node, path, depth = nodes.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            message = f"{place} is too large: at most {MAX_NODES} schemas, nested {MAX_DEPTH} deep, are allowed."
            raise InvalidRequestError(message, param=place)
        yield node, path
        if isinstance(node, dict):
            nodes.extend((child, path + step, depth + 1) for child, step in _children(node))


def _children(node: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    for name in MAPS:
        if isinstance(value := node.get(name), dict):
            yield from ((child, f".{name}.{key[:64]}") for key, child in value.items())
    for name in (*LISTS, *_SINGLE, *_UNBOUNDED):
        if isinstance(value := node.get(name), list) and name not in ("additionalProperties", *_UNBOUNDED):
            yield from ((child, f".{name}[{index}]") for index, child in enumerate(value))
        elif name in node:
            yield value, f".{name}"


def _is_simple(schema: Mapping[str, Any], place: str) -> bool:
    """Return True if unconstrained values can be bounded too, and check the size.

    If llguidance has to intersect schemas, or to resolve references relative to another place than the root, an
    additional definition would get in the way.
    """
    simple = True
    for node, path in walk(schema, place):
        if not isinstance(node, dict):
            continue
        combined = any(name in node for name in _COMBINED) and not _CONSTRAINTS.isdisjoint(node)
        moved = path and (isinstance(node.get("$id"), str) or isinstance(node.get("id"), str))
        if "allOf" in node or combined or moved or sum(name in node for name in _COMBINED) > 1:
            simple = False
    return simple


class _Bounder:
    """Copy of a schema with bounds.

    Args:
        bound_any: Bound unconstrained values as well.
    """

    def __init__(self, place: str, bound_any: bool, *, close_objects: bool) -> None:
        self._place = place
        self._bound_any = bound_any
        self._close_objects = close_objects
        self._any_name = "any"
        self._any_used = False

    def whole(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        definitions = schema.get("$defs")
        if isinstance(definitions, dict):
            while self._any_name in definitions:
                self._any_name += "_"
        bounded: dict[str, Any] = self._bounded(dict(schema), "")
        if self._any_used:
            whole_any = self._bounded({}, "")
            bounded["$defs"] = {**bounded.get("$defs", {}), self._any_name: whole_any}
        return bounded

    def _any(self) -> dict[str, str]:
        self._any_used = True
        return {"$ref": f"#/$defs/{self._any_name}"}

    def _bounded(self, node: Any, path: str) -> Any:
        if isinstance(node, bool):
            return self._any() if node and self._bound_any else node
        if not isinstance(node, dict):
            place = f"{self._place}{path}"
            raise InvalidRequestError(f"{place} must be a JSON schema, which is an object.", param=place)
        result = {name: value for name, value in node.items() if not _demands_nothing(name, value)}
        for name in _NUMBERS:
            # llguidance would ignore a value that is not a number.
            if name in node and (isinstance(node[name], bool) or not isinstance(node[name], int | float)):
                place = f"{self._place}{path}.{name}"
                raise InvalidRequestError(f"{place} must be a number.", param=place)
        _exclude_zero(result)
        self._check_patterns(node, path)
        for name in MAPS:
            if name in node:
                children = self._of_kind(node, name, dict, path)
                result[name] = {key: self._bounded(one, f"{path}.{name}.{key[:64]}") for key, one in children.items()}
        for name in LISTS:
            if name in node:
                children = self._of_kind(node, name, list, path)
                result[name] = [self._bounded(one, f"{path}.{name}[{index}]") for index, one in enumerate(children)]
        for name in _SINGLE:
            if isinstance(value := node.get(name), list) and name != "additionalProperties":
                result[name] = [self._bounded(one, f"{path}.{name}[{index}]") for index, one in enumerate(value)]
            elif name in node:
                result[name] = self._bounded(value, f"{path}.{name}")
        if not any(name in node for name in _FIXED):
            self._bound_values(result)
        elif self._close_objects and "properties" in node:
            result.setdefault("additionalProperties", False)
        return result

    def _check_patterns(self, node: Mapping[str, Any], path: str) -> None:
        """Check the size of a regular expression. llguidance refuses malformed ones later.

        Raises:
            InvalidRequestError: The expression is too large.
        """
        if isinstance(pattern := node.get("pattern"), str):
            check_size(pattern, f"{self._place}{path}.pattern")
        if isinstance(patterns := node.get("patternProperties"), dict):
            for pattern in patterns:
                check_size(pattern, f"{self._place}{path}.patternProperties.{pattern[:64]}")

    def _of_kind(self, node: Mapping[str, Any], name: str, kind: type, path: str) -> Any:
        if not isinstance(node[name], kind):
            place = f"{self._place}{path}.{name}"
            raise InvalidRequestError(f"{place} must be {'an object' if kind is dict else 'a list'}.", param=place)
        return node[name]

    def _bound_values(self, node: dict[str, Any]) -> None:
        """Bound the values that this schema itself allows."""
        length = FORMAT_LENGTHS.get(str(node.get("format")))
        if length is not None and "maxLength" not in node and node.get("minLength", 0) in range(length):
            node["maxLength"] = length
        kinds = node.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        anything = kinds is None
        if not anything and not isinstance(kinds, list):
            return
        kinds = kinds or ()
        if self._bound_any if anything else "number" in kinds or "integer" in kinds:
            _bound_number(node, decimals=anything or "number" in kinds)
        if self._close_objects and ("properties" in node or "patternProperties" in node):
            node.setdefault("additionalProperties", False)
        if not self._bound_any:
            return
        if anything or "object" in kinds:
            node.setdefault("additionalProperties", self._any())
        if (anything or "array" in kinds) and "items" not in node:
            node["items"] = self._any()


def _demands_nothing(keyword: str, value: object) -> bool:
    idle = _IDLE.get(keyword, ())
    return keyword in ANNOTATIONS or any(type(value) is type(one) and value == one for one in idle)


def _exclude_zero(node: dict[str, Any]) -> None:
    """Exclude 0 from a number without an exclusive bound.

    llguidance accepts 0 and -0 at an exclusive bound if the other bound is between -1 and 1.
    """
    least = 10.0**-NUM_DECIMALS
    if node.get("type") == "integer":
        return
    if node.get("exclusiveMinimum") == 0:
        del node["exclusiveMinimum"]
        node["minimum"] = max(node.get("minimum", least), least)
    if node.get("exclusiveMaximum") == 0:
        del node["exclusiveMaximum"]
        node["maximum"] = min(node.get("maximum", -least), -least)


def _bound_number(node: dict[str, Any], *, decimals: bool) -> None:
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    if low is None and (high is None or high > -MAX_NUMBER):
        node["minimum"] = -MAX_NUMBER
    if high is None and (low is None or low < MAX_NUMBER):
        node["maximum"] = MAX_NUMBER
    if decimals and "multipleOf" not in node:
        node["multipleOf"] = 10.0**-NUM_DECIMALS


def check_strict(schema: Mapping[str, Any], place: str) -> None:
    """Check that a schema belongs to the subset of JSON Schema that OpenAI supports with `strict`.

    Every object lists all its properties and allows no others (OpenAI's guide "Structured outputs", "Supported
    schemas").

    Raises:
        InvalidRequestError: It does not; the error has `place` as its parameter.
    """
    root_type = schema.get("type")
    if "anyOf" in schema or ("$ref" not in schema and root_type != "object"):
        raise _strict_error(place, "", 'with strict, the schema itself must have type "object" and no anyOf')
    for node, path in walk(schema, place):
        if isinstance(node, dict):
            _check_strict_node(node, place, path)


def is_strict(schema: object) -> bool:
    """Return True if OpenAI supports this schema with `strict`."""
    if not isinstance(schema, dict):
        return False
    try:
        check_strict(schema, "")
    except InvalidRequestError:
        return False
    return True


def _check_strict_node(node: Mapping[str, Any], place: str, path: str) -> None:
    if refused := sorted(_NOT_STRICT.intersection(node)):
        raise _strict_error(place, path, f"with strict, {refused[0]} is not allowed")
    kinds = node.get("type")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds) and "properties" not in node:
        return
    if node.get("additionalProperties") is not False:
        raise _strict_error(place, path, "with strict, each object must have additionalProperties: false")
    properties = node.get("properties", {})
    required = node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    listed = {name for name in required if isinstance(name, str)}
    missing = [name for name in properties if name not in listed]
    if missing:
        name = missing[0][:64]
        raise _strict_error(place, path, f"with strict, required must list every property; {name!r} is missing")


def _strict_error(place: str, path: str, what: str) -> InvalidRequestError:
    where = f" (at {place}{path})" if path else ""
    return InvalidRequestError(f"{place} cannot be used: {what}{where}.", param=place, code="invalid_json_schema")
