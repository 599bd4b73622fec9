"""Structured output: what `response_format` and `structured_outputs` demand of the content, as a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from gateway.api.common.structured_fields import (
    JsonObjectFormat,
    JsonSchemaField,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from gateway.text.grammars.client import choice_fragment, grammar_fragment, regex_fragment
from gateway.text.grammars.grammar import Fragment
from gateway.text.grammars.json_schema import json_expression
from gateway.text.grammars.regex_size import check_size
from gateway.text.grammars.strict_schema import check_strict
from gateway.text.grammars.structural_tags import structural_tag_fragment
from gateway.text.json_text import parsed_json
from shared.errors import InvalidRequestError

MAX_WHITESPACE_PATTERN = 256
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON_KINDS = ("json", "json_object", "structural_tag")


class StructuredFields(Protocol):
    """The fields that are read here; both generating endpoints have them."""

    @property
    def response_format(self) -> ResponseFormat | None: ...
    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...


def structured_fragment(fields: StructuredFields, special_ids: Mapping[str, int] | None = None) -> Fragment | None:
    """What the content must be; None where anything may be said. Its rules and terminals begin with `so_` or `st_`.

    Args:
        special_ids: text of each special token of the model -> its id; for structural tags.

    Raises:
        InvalidRequestError: names the field at fault. What only llguidance finds is left to
            gateway.text.grammars.checker.
    """
    special_ids = special_ids or {}
    asked, outputs = fields.response_format, fields.structured_outputs
    found = None if asked is None else _of_response_format(asked, special_ids)
    if outputs is None:
        return found
    if found is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other.", param="structured_outputs"
        )
    return _of_structured_outputs(outputs, special_ids)


def _of_response_format(asked: ResponseFormat, special_ids: Mapping[str, int]) -> Fragment | None:
    if isinstance(asked, JsonObjectFormat):
        return _json({"type": "object"}, "response_format")
    if isinstance(asked, JsonSchemaFormat):
        return _json_schema(asked.json_schema)
    if isinstance(asked, StructuralTagFormat):
        value = {"format": asked.format, "structures": asked.structures, "triggers": asked.triggers}
        return structural_tag_fragment(value, "response_format", special_ids)
    return None


def _json_schema(field: JsonSchemaField) -> Fragment:
    place = "response_format.json_schema"
    if not _NAME.fullmatch(field.name):
        message = f"{place}.name must have 1 to 64 letters, digits, underscores and dashes."
        raise InvalidRequestError(message, param=f"{place}.name")
    place = f"{place}.schema"
    if field.strict:
        check_strict(field.schema, place)
    return _json(field.schema, place)


def _of_structured_outputs(outputs: StructuredOutputs, special_ids: Mapping[str, int]) -> Fragment:
    given = [name for name in _KINDS if getattr(outputs, name) not in (None, False)]
    if len(given) != 1:
        found = f"it has {' and '.join(given)}" if given else "it has none"
        raise InvalidRequestError(
            f"structured_outputs must have exactly one of {', '.join(_KINDS)}; {found}.", param="structured_outputs"
        )
    place = f"structured_outputs.{given[0]}"
    whitespace = _whitespace(outputs, given[0])
    if outputs.regex is not None:
        return regex_fragment(outputs.regex, "SO_REGEX", place)
    if outputs.choice is not None:
        return choice_fragment(outputs.choice, "SO_CHOICE", place)
    if outputs.grammar is not None:
        return grammar_fragment(outputs.grammar, "so_grammar", place)
    if outputs.structural_tag is not None:
        value = _object(outputs.structural_tag, place)
        _only_structural(value, place)
        return structural_tag_fragment(value, place, special_ids, whitespace)
    schema = {"type": "object"} if outputs.json is None else _object(outputs.json, place)
    return _json(schema, place, whitespace=whitespace, close_objects=bool(outputs.disable_additional_properties))


def _whitespace(outputs: StructuredOutputs, kind: str) -> str | None:
    """Checks how JSON is to be written, which nothing else can heed."""
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        given = getattr(outputs, name) not in (None, False)
        heeded = ("json", "json_object") if name == "disable_additional_properties" else _JSON_KINDS
        if given and kind not in heeded:
            place = f"structured_outputs.{name}"
            raise InvalidRequestError(f"{place} has no meaning for {kind}.", param=place)
    pattern = outputs.whitespace_pattern
    if pattern is not None and len(pattern) > MAX_WHITESPACE_PATTERN:
        place = "structured_outputs.whitespace_pattern"
        message = f"{place} has {len(pattern)} characters; at most {MAX_WHITESPACE_PATTERN} are possible."
        raise InvalidRequestError(message, param=place)
    if pattern is not None:
        check_size(pattern, "structured_outputs.whitespace_pattern")
    if not outputs.disable_any_whitespace:
        return pattern
    if pattern:
        place = "structured_outputs.disable_any_whitespace"
        raise InvalidRequestError(f"{place} excludes whitespace_pattern.", param=place)
    return ""


def _object(value: str | dict[str, Any], place: str) -> dict[str, Any]:
    found = parsed_json(value, place) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{place} must be an object, or the text of one.", param=place)
    return found


def _only_structural(value: Mapping[str, Any], place: str) -> None:
    for name in value:
        if name not in ("type", "format", "structures", "triggers"):
            raise InvalidRequestError(f"{place}.{name[:64]} is not supported.", param=f"{place}.{name[:64]}")
    if value.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequestError(f'{place}.type must be "structural_tag".', param=f"{place}.type")


def _json(
    schema: Mapping[str, Any], place: str, *, whitespace: str | None = None, close_objects: bool = False
) -> Fragment:
    expression = json_expression(schema, place, whitespace=whitespace, close_objects=close_objects)
    return Fragment("so_json", (f"so_json: {expression}",), param=place)
