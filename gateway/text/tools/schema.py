"""JSON schemas of tools' arguments: validation, and conversion to expressions of a grammar.

The library jsonschema does not do for the validation: its metaschemas refuse schemas that clients send and from which
a grammar can be made, and a check takes 5 to 20 times as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway.text.grammars.json_schema import LISTS, MAPS, json_expression, walk
from gateway.text.grammars.regex_size import MAX_WRITTEN_OUT, num_written_out, written_out_refusal
from gateway.text.tools.format import Tool
from shared.errors import InvalidRequestError

MAX_PATTERN = 8192

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_REFERENCE = re.compile(r"\\[1-9]|\\k<")
_PATTERN_TOKEN = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|$)|\(\?<?[=!]|.", re.DOTALL)
"""Token of a regular expression: an escape, a character class (or all of the rest, if it does not end), the beginning
of a look-around group, or a character.
"""
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if")


def check_parameters(schema: Mapping[str, Any], place: str) -> None:
    """Check that a value has the form of a JSON schema: known types, valid patterns.

    Raises:
        InvalidRequestError: It has not; the error has `place` as its parameter.
    """
    for node, path in walk(schema, place):
        if not isinstance(node, bool) and (problem := _problem(node)):
            raise InvalidRequestError(f"{place}{path} is not a JSON schema: {problem}.", param=place)
    kind = schema.get("type", "object")
    if kind != "object" and kind != ["object"]:
        raise InvalidRequestError(f'{place}.type must be "object".', param=place)


def _problem(node: object) -> str | None:
    """Return the fault of one schema without its subschemas."""
    if not isinstance(node, dict):
        return "it must be an object or a boolean"
    kinds = node.get("type", "object")
    for kind in kinds if isinstance(kinds, list) and kinds else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            return f"{json.dumps(kind)[:64]} is not a type; use one of {', '.join(sorted(_TYPES))}"
    for name in MAPS:
        if not isinstance(node.get(name, {}), dict):
            return f"{name} must be an object"
    for name in LISTS:
        if name in node and (not isinstance(node[name], list) or not node[name]):
            return f"{name} must be a non-empty list"
    if "enum" in node and (not isinstance(node["enum"], list) or not node["enum"]):
        return "enum must be a non-empty list"
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required must be a list of strings"
    if not isinstance(node.get("$ref", ""), str):
        return "$ref must be a string"
    patterns = list(node.get("patternProperties", {}))
    if "pattern" in node:
        patterns.append(node["pattern"])
    for pattern in patterns:
        if reason := _pattern_problem(pattern):
            return f"pattern {json.dumps(pattern)[:64]}: {reason}"
    return None


def _pattern_problem(pattern: object) -> str | None:
    """Return the reason why a text is not a regular expression of ECMA 262.

    Python's syntax, which is close to it, is checked.
    """
    if not isinstance(pattern, str):
        return "it must be a string"
    if len(pattern) > MAX_PATTERN:
        return f"it has more than {MAX_PATTERN} characters"
    if num_written_out(pattern) > MAX_WRITTEN_OUT:
        return written_out_refusal(MAX_WRITTEN_OUT, "characters")
    # Constructs that the other dialect writes differently.
    text = re.sub(r"\\[pP]\{[^}]*\}|\\u\{[0-9a-fA-F]+\}|\\c[A-Za-z]", r"\\w", pattern)
    text = re.sub(r"\(\?<(?![=!])", "(?P<", re.sub(r"\\k<(\w+)>", r"(?P=\1)", text))
    text = "".join(token[0] + token[1:].replace("[", "\\[") if token[0] == "[" else token for token in _tokens(text))
    try:
        re.compile(text)
    except Warning:
        return None
    except re.error as error:
        return None if "fixed-width" in error.msg else error.msg
    except (RecursionError, OverflowError):
        return "it is too large"
    except ValueError as error:  # contradicting flags
        return str(error)
    return None


def arguments_expression(tool: Tool) -> str:
    """Return the arguments of a tool as a JSON object, as an expression of a grammar."""
    return value_expression(arguments_schema(tool), tool)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema that constrains a tool's arguments.

    If it lists properties, others are allowed only if it says so. For a tool that is not strict, patterns that no
    automaton can follow are left out.
    """
    schema = dict(tool.parameters) if tool.strict else _without_lookaround(dict(tool.parameters))
    schema["type"] = "object"
    open_ended = (*_COMBINED, "additionalProperties", "patternProperties", "unevaluatedProperties")
    if not tool.parameters or ("properties" in schema and not any(name in schema for name in open_ended)):
        schema["additionalProperties"] = False
    return schema


def value_expression(schema: Mapping[str, Any], tool: Tool, *, whitespace: str | None = " ") -> str:
    """Return the JSON values of a schema, on one line unless other white space is given."""
    return json_expression(
        schema, tool.place, whitespace=whitespace, close_objects=_may_close(schema), lenient=not tool.strict
    )


def refers_elsewhere(node: Any) -> bool:
    """Return True if a schema refers to other places than its definitions, so that no part of it is self-contained."""
    if isinstance(node, list):
        return any(map(refers_elsewhere, node))
    if not isinstance(node, Mapping):
        return False
    target = node.get("$ref")
    if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
        return True
    return any(map(refers_elsewhere, node.values()))


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that parts of a schema may refer to."""
    return {key: value for key, value in schema.items() if key in ("$defs", "definitions")}


ANY_OBJECT = json_expression({"type": "object"}, "tools", whitespace=" ")
ANY_VALUE = json_expression({}, "tools", whitespace=" ")


def _may_close(node: Any) -> bool:
    """Return True if objects may be closed to additional properties, that is, if no two schemas apply to one object."""
    if isinstance(node, list):
        return all(map(_may_close, node))
    if not isinstance(node, Mapping):
        return True
    if "properties" in node and any(name in node for name in _COMBINED):
        return False
    return "allOf" not in node and all(map(_may_close, node.values()))


def _without_lookaround(node: Any) -> Any:
    """Return the schema without the patterns that no automaton can follow.

    Look-around groups are removed, and so are whole patterns with back references.
    """
    if isinstance(node, list):
        return [_without_lookaround(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {}
    for key, value in node.items():
        if key != "pattern" or not isinstance(value, str):
            result[key] = _without_lookaround(value)
        elif (plain := _plain_pattern(value)) is not None:
            result[key] = plain
    return result


def _tokens(pattern: str) -> list[str]:
    return _PATTERN_TOKEN.findall(pattern)


def _plain_pattern(pattern: str) -> str | None:
    """Return a pattern without look-around that matches at least what this one matches; None if there is none."""
    if _REFERENCE.search(pattern):
        return None
    kept: list[str] = []
    skipped = 0
    for token in _tokens(pattern):
        opens = token.startswith("(")
        if skipped:
            skipped += 1 if opens else -1 if token == ")" else 0
        elif _LOOKAROUND.fullmatch(token):
            skipped = 1
        else:
            kept.append(token)
    text = "".join(kept)
    return None if skipped or _pattern_problem(text) else text
