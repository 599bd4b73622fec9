"""The fields `response_format` and `structured_outputs`; gateway.api.common.structured says what they demand."""

from __future__ import annotations

from typing import Any

import msgspec


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"):
    """`{"type": "text"}`: nothing is demanded."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_object"):
    """`{"type": "json_object"}`."""


class JsonSchemaField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format.json_schema`. The schema is enforced whatever `strict` says; see
    gateway.text.grammars.strict_schema.
    """

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"):
    """`{"type": "json_schema", "json_schema": {...}}`."""

    json_schema: JsonSchemaField


class StructuralTagFormat(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="structural_tag"
):
    """`{"type": "structural_tag", ...}`, vLLM's; see gateway.text.grammars.structural_tags."""

    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`structured_outputs`, vLLM's: one of json, regex, choice, grammar, json_object and structural_tag, and how JSON
    is written."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
