"""Grammars of arguments that are written one by one after their names, not as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.text.grammars.grammar import Fragment, any_of
from gateway.text.tools.format import Tool
from gateway.text.tools.schema import ANY_VALUE, arguments_schema, definitions, refers_elsewhere, value_expression

_PLAIN = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "additionalProperties",
        "definitions",
        "description",
        "examples",
        "properties",
        "required",
        "title",
        "type",
    }
)
"""Keywords of schemas whose properties can be written one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """Notation of arguments.

    Attributes:
        is_name: Function that tells whether a name can be written without quotes.
        sign: Text between a name and its value.
        between: Text between two arguments.
        constant: Function that returns the text of True, False and None, and None for other values, which are
            JSON.
        spread: Text that turns one JSON object into all arguments, for schemas that cannot be written one by one.
    """

    is_name: Callable[[str], bool]
    sign: str
    between: str
    constant: Callable[[object], str | None]
    spread: str


def keyword_arguments(tool: Tool, notation: Notation, prefix: str, *, free: bool) -> Fragment:
    """Return the arguments of a tool.

    Args:
        tool: The tool.
        notation: Notation of the arguments.
        prefix: Prefix of the names of rules.
        free: Allow any arguments whatever the schema says.
    """
    if free:
        pair = f"{prefix}_pair: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {json.dumps(notation.sign)} {ANY_VALUE}"
        return Fragment(f"({prefix}_pair ({json.dumps(notation.between)} {prefix}_pair)*)?", (pair,))
    schema = arguments_schema(tool)
    if not _is_plain(schema, notation):
        return Fragment(f"{json.dumps(notation.spread)} {value_expression(schema, tool)}")
    required = frozenset(schema.get("required", ()))
    names = list(schema.get("properties", {}))
    shared = definitions(schema)
    rules = []
    for index, name in enumerate(names):
        value = _value(schema["properties"][name], shared, notation, tool)
        rules.append(f"{prefix}_{index}: {json.dumps(name + notation.sign)} {value}")
    return Fragment(f"{prefix}_first_0", (*rules, *_order(prefix, [name in required for name in names], notation)))


def _is_plain(schema: Mapping[str, Any], notation: Notation) -> bool:
    """Return True if each argument's schema is self-contained and only the named arguments are possible."""
    properties = schema.get("properties", {})
    return (
        schema.keys() <= _PLAIN
        and schema.get("additionalProperties") is False
        and all(map(notation.is_name, properties))
        and set(schema.get("required", ())) <= properties.keys()
        and not refers_elsewhere(schema)
    )


def _order(prefix: str, required: list[bool], notation: Notation) -> list[str]:
    """Return rules for arguments in the order of the schema, with optional ones left out or not."""
    rules = [f'{prefix}_first_{len(required)}: ""', f'{prefix}_next_{len(required)}: ""']
    for index, is_required in enumerate(required):
        for kind, separator in (("first", ""), ("next", json.dumps(notation.between) + " ")):
            body = f"{separator}{prefix}_{index} {prefix}_next_{index + 1}"
            skip = "" if is_required else f" | {prefix}_{kind}_{index + 1}"
            rules.append(f"{prefix}_{kind}_{index}: {body}{skip}")
    return rules


def _value(schema: Any, shared: Mapping[str, Any], notation: Notation, tool: Tool) -> str:
    """Return the values of one argument.

    Constants use the notation's own words if the schema says nothing more specific.
    """
    if not isinstance(schema, Mapping):
        return ANY_VALUE
    constants: tuple[object, ...] = ()
    if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
        constants = (True, False)
    elif schema.get("type") == "null":
        constants = (None,)
    spelled = [text for value in constants if (text := notation.constant(value)) is not None]
    if spelled:
        return any_of(map(json.dumps, spelled))
    return value_expression({**schema, **shared}, tool)
