"""Structured output: `response_format` and `structured_outputs` as a grammar of the content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.api.common.fields import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
    invalid,
)
from gateway.http.body import convert
from gateway.text.grammars.client import choice_fragment, grammar_fragment, regex_fragment
from gateway.text.grammars.grammar import Fragment
from gateway.text.grammars.json_schema import check_strict, json_expression
from gateway.text.grammars.regex_size import check_size
from gateway.text.grammars.structural_tags import StructuralTag, structural_tag_fragment
from gateway.text.json_text import parsed_json

MAX_WHITESPACE_PATTERN = 256
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON_KINDS = ("json", "json_object", "structural_tag")


def structured_fragment(fields: SamplingFields, special_ids: Mapping[str, int] | None = None) -> Fragment | None:
    """Return the grammar of the content; None for free text. Its rules and terminals begin with `so_` or `st_`.

    Args:
        fields: The request.
        special_ids: Id of each special token, by its text; for structural tags.

    Raises:
        InvalidRequestError: A field is invalid; the error names it. gateway.text.grammars.checker finds the errors that
            only llguidance detects.
    """
    special_ids = special_ids or {}
    response_format, outputs = fields.response_format, fields.structured_outputs
    fragment = None if response_format is None else _format_fragment(response_format, special_ids)
    if outputs is None:
        return fragment
    if fragment is not None:
        raise invalid("structured_outputs", "and response_format cannot be combined. Send one of them.")
    return _outputs_fragment(outputs, special_ids)


def _format_fragment(field: ResponseFormat, special_ids: Mapping[str, int]) -> Fragment | None:
    if isinstance(field, JsonObjectFormat):
        return _json({"type": "object"}, "response_format")
    if isinstance(field, StructuralTag):
        return structural_tag_fragment(field, "response_format", special_ids)
    if not isinstance(field, JsonSchemaFormat):
        return None
    place, schema = "response_format.json_schema", field.json_schema
    if not _NAME.fullmatch(schema.name):
        raise invalid(f"{place}.name", "must have 1 to 64 letters, digits, underscores and dashes.")
    place = f"{place}.schema"
    if schema.strict:
        check_strict(schema.schema, place)
    return _json(schema.schema, place)


def _outputs_fragment(outputs: StructuredOutputs, special_ids: Mapping[str, int]) -> Fragment:
    given = [name for name in _KINDS if getattr(outputs, name) not in (None, False)]
    if len(given) != 1:
        raise invalid(
            "structured_outputs",
            f"must have exactly one of {', '.join(_KINDS)}; it has {' and '.join(given) or 'none'}.",
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
        value = convert(_object(outputs.structural_tag, place), StructuralTag, place)
        return structural_tag_fragment(value, place, special_ids, whitespace)
    schema = {"type": "object"} if outputs.json is None else _object(outputs.json, place)
    return _json(schema, place, whitespace=whitespace, close_objects=bool(outputs.disable_additional_properties))


def _whitespace(outputs: StructuredOutputs, kind: str) -> str | None:
    """Check the options on how JSON is written, and return the pattern of whitespace; None for the default."""
    place = "structured_outputs.{}".format
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        kinds = ("json", "json_object") if name == "disable_additional_properties" else _JSON_KINDS
        if getattr(outputs, name) not in (None, False) and kind not in kinds:
            raise invalid(place(name), f"cannot be combined with {kind}.")
    pattern, name = outputs.whitespace_pattern, place("whitespace_pattern")
    if pattern is not None and len(pattern) > MAX_WHITESPACE_PATTERN:
        raise invalid(name, f"has {len(pattern)} characters; at most {MAX_WHITESPACE_PATTERN} are allowed.")
    if pattern is not None:
        check_size(pattern, name)
    if not outputs.disable_any_whitespace:
        return pattern
    if pattern:
        name = place("disable_any_whitespace")
        raise invalid(name, "cannot be combined with whitespace_pattern.")
    return ""


def _object(value: str | dict[str, Any], place: str) -> dict[str, Any]:
    found = parsed_json(value, place) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise invalid(place, "must be an object, or a string with the JSON of one.")
    return found


def _json(
    schema: Mapping[str, Any], place: str, *, whitespace: str | None = None, close_objects: bool = False
) -> Fragment:
    expression = json_expression(schema, place, whitespace=whitespace, close_objects=close_objects)
    return Fragment("so_json", (f"so_json: {expression}",), param=place)
