"""docs/API.md against the code and OpenAI's package: endpoints, fields with their types, and refused fields.

`python -m tests.architecture.test_api_document` writes the tables of refused fields and of query parameters; the others
are written by hand.
"""

from __future__ import annotations

import json
import re
import types
import typing

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    FunctionToolParam,
    ResponseIncludable,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import StreamOptions
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.response_input_text_param import ResponseInputTextParam
from openai.types.responses.response_output_refusal_param import ResponseOutputRefusalParam
from openai.types.responses.response_output_text_param import ResponseOutputTextParam
from openai.types.shared_params.reasoning import Reasoning

from gateway.api.anthropic.fields import NO_EFFECT as TAKEN
from gateway.api.anthropic.fields import REFUSED, ConversationFields, MessagesFields
from gateway.api.common.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    FunctionField,
    SamplingFields,
    TokenizeFields,
)
from gateway.api.common.refused import NO_EFFECT, UNSUPPORTED
from gateway.api.openai.embeddings import EmbeddingFields
from gateway.api.responses import fields as responses
from gateway.api.responses.fields import InputFields, InputTokensFields, ResponseFields
from gateway.api.responses.items import _FIELDS, _PARTS
from gateway.app import ROUTES
from gateway.openapi import describe
from tests.architecture.source import ROOT

DOCUMENT = ROOT / "docs" / "API.md"
BOTH = set(SamplingFields.__struct_fields__)
TABLES = {
    "both": (SamplingFields, BOTH),
    "chat": (ChatFields, set(ChatFields.__struct_fields__) - BOTH),
    "completions": (CompletionFields, set(CompletionFields.__struct_fields__) - BOTH),
    "conversation": (ConversationFields, set(ConversationFields.__struct_fields__)),
    "messages": (MessagesFields, set(MessagesFields.__struct_fields__) - set(ConversationFields.__struct_fields__)),
    "input": (InputFields, set(InputFields.__struct_fields__)),
    "responses": (ResponseFields, set(ResponseFields.__struct_fields__) - set(InputFields.__struct_fields__)),
    "input_tokens": (InputTokensFields, set(InputTokensFields.__struct_fields__) - set(InputFields.__struct_fields__)),
    "embeddings": (EmbeddingFields, set(EmbeddingFields.__struct_fields__)),
    "tokenize": (TokenizeFields, set(TokenizeFields.__struct_fields__)),
    "detokenize": (DetokenizeFields, set(DetokenizeFields.__struct_fields__)),
}
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def cells(text: str) -> list[list[str]]:
    """Return the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def section(name: str) -> str:
    """Return the text between the marks of a part of the document."""
    return DOCUMENT.read_text("utf-8").partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def part(name: str) -> list[list[str]]:
    return cells(section(name))


def described(kind: object) -> str:
    """Return a type as the document calls it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        options = [described(one) for one in arguments if one is not type(None)]
        return " or ".join(dict.fromkeys(options))
    if origin is list:
        return "array" if arguments[0] is typing.Any else f"array of {described(arguments[0])}"
    if origin is dict:
        return "object" if arguments[1] is typing.Any else f"object of {described(arguments[1])}"
    return NAMES.get(kind, "object")


@pytest.mark.parametrize("name", TABLES)
def test_fields_and_types(name):
    struct, fields = TABLES[name]
    rows = part(name)
    written = [row[0].strip("`") for row in rows]
    assert sorted(written) == sorted(fields)
    hints = typing.get_type_hints(struct)
    assert {row[0].strip("`"): row[1] for row in rows} == {field: described(hints[field]) for field in fields}
    required = {field.name for field in msgspec.structs.fields(struct) if field.required} & fields
    assert {row[0].strip("`") for row in rows if row[2] == "required"} == required
    assert all(row[2] for row in rows)


def test_endpoints():
    text = DOCUMENT.read_text("utf-8")
    rows = cells(text.partition("## Endpoints\n")[2].partition("\nScopes:")[0])
    written = {(row[0], row[1].strip("`"), row[2]) for row in rows}
    real = {(route.method, route.path.replace("{model:.+}", "{id}"), route.scope.name.lower()) for route in ROUTES}
    assert written == real


def written_values(values: typing.Iterable[object]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def table(titles: str, rows: typing.Iterable[tuple[str, ...]]) -> str:
    """Return a table as the document has it."""
    lines = ["", titles, "|---" * (titles.count("|") - 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n\n"


def refused_table() -> str:
    kinds = {"chat": ChatFields, "completions": CompletionFields}
    refusing = {
        name: [kind for kind, struct in kinds.items() if name not in struct.__struct_fields__] for name in UNSUPPORTED
    }
    return table(
        "| field | refused by | reason, or replacement | accepted values |",
        (
            (
                f"`{name}`",
                " and ".join(by),
                UNSUPPORTED[name] or "not supported",
                written_values(NO_EFFECT.get(name, ())),
            )
            for name, by in sorted(refusing.items())
            if by
        ),
    )


def refused_by_responses_table() -> str:
    return table(
        "| field | reason, or replacement | accepted values |",
        (
            (f"`{name}`", refusal.reason, written_values(refusal.accepted))
            for name, refusal in sorted(responses.REFUSED.items())
        ),
    )


def query_table() -> str:
    """Return the query parameters of the routes as in openapi.json."""
    return table(
        "| endpoint | parameter | type | default | |",
        (
            (
                f"{method.upper()} `{path}`",
                f"`{parameter['name']}`",
                *described_schema(parameter["schema"]),
                parameter["description"],
            )
            for path, methods in describe(ROUTES)["paths"].items()
            for method, operation in methods.items()
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query"
        ),
    )


def described_schema(schema: dict[str, object]) -> tuple[str, str]:
    """Return the type and the default, in words."""
    kind, default = str(schema.get("type", "")), schema.get("default")
    if isinstance(values := schema.get("enum"), list):
        kind = " or ".join(f"`{value}`" for value in values)
    elif "maximum" in schema:
        kind = f"{kind}, {schema['minimum']} to {schema['maximum']}"
    if default is None:
        return kind, ""
    return kind, str(default).lower() if isinstance(default, bool) else str(default)


GENERATED = {
    "refused": refused_table,
    "responses refused": refused_by_responses_table,
    "query": query_table,
}


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_up_to_date(name):
    assert section(name) == GENERATED[name](), "python -m tests.architecture.test_api_document writes it"


def test_refused_by_messages():
    written = {row[0].strip("`"): row[1:] for row in part("messages refused")}
    assert written == {
        name: [why or "not supported", written_values(TAKEN.get(name, ()))] for name, why in REFUSED.items()
    }
    assert not set(REFUSED) & set(MessagesFields.__struct_fields__)


def test_no_field_is_both_accepted_and_refused():
    assert not set(UNSUPPORTED) & set(ChatFields.__struct_fields__) & set(CompletionFields.__struct_fields__)
    of_responses = {*ResponseFields.__struct_fields__, *InputTokensFields.__struct_fields__}
    assert not set(responses.REFUSED) & of_responses


RESPONSES = set(responses.REFUSED)
"""Refused by /v1/responses; fields of an object are named with a dot."""
OPENAI = [
    (chat_create_params.CompletionCreateParamsNonStreaming, ChatFields, "", UNSUPPORTED),
    (chat_create_params.CompletionCreateParamsStreaming, ChatFields, "", UNSUPPORTED),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionFields, "", UNSUPPORTED),
    (completion_create_params.CompletionCreateParamsStreaming, CompletionFields, "", UNSUPPORTED),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingFields, "", UNSUPPORTED),
    (response_create_params.ResponseCreateParamsNonStreaming, ResponseFields, "", RESPONSES),
    (InputTokenCountParams, InputTokensFields, "", RESPONSES),
    (Reasoning, responses.ReasoningField, "reasoning.", RESPONSES),
    (ResponseTextConfigParam, responses.TextField, "text.", RESPONSES),
    (StreamOptions, None, "stream_options.", RESPONSES),
    (FunctionToolParam, FunctionField, "tools[].", RESPONSES),
]


@pytest.mark.parametrize(("openai", "ours", "outer", "refused"), OPENAI)
def test_every_field_of_openais_package_is_accepted_or_refused_with_a_reason(openai, ours, outer, refused):
    accepted = set() if ours is None else set(ours.__struct_fields__)
    if ours is FunctionField:
        accepted.add("type")
    names = {name.removeprefix(outer) for name in refused if outer or "." not in name}
    assert set(typing.get_type_hints(openai)) - accepted - names == set()


def test_includable_values_are_openais_and_in_the_document():
    assert set(responses.INCLUDABLE) <= set(typing.get_args(ResponseIncludable))
    text = DOCUMENT.read_text("utf-8")
    assert all(f"`{name}`" in text for name in responses.INCLUDABLE)


def test_accepted_items_and_parts_have_the_fields_that_openais_package_sends():
    for item in typing.get_args(ResponseInputItemParam):
        hints = typing.get_type_hints(item)
        for kind in typing.get_args(hints.get("type")):
            if kind in _FIELDS:
                assert set(hints) - {"type", "id", "status"} <= {*_FIELDS[kind]}, kind
    for part_type in (ResponseInputTextParam, ResponseOutputTextParam, ResponseOutputRefusalParam):
        hints = typing.get_type_hints(part_type)
        (kind,) = typing.get_args(hints["type"])
        assert set(hints) - {"type"} <= {*_PARTS[kind]}, kind


def structs(kind: object) -> set[type[msgspec.Struct]]:
    """Return the structs that a field of this type may be."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {kind}
    return set().union(*(structs(inner) for inner in typing.get_args(kind)))


def test_null_counts_as_absent_in_objects():
    seen: set[type[msgspec.Struct]] = set()
    left: set[type[msgspec.Struct]] = {kind for kind, _ in TABLES.values()}
    while left:
        kind = left.pop()
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            assert field.required or type(None) in typing.get_args(field.type), f"{kind.__name__}.{field.name}"
            left |= structs(field.type) - seen
    assert len(seen) > len(TABLES)


def main() -> None:
    for name, generate in GENERATED.items():
        head, opening, rest = DOCUMENT.read_text("utf-8").partition(f"<!-- {name} -->\n")
        closing = f"<!-- /{name} -->"
        DOCUMENT.write_text(head + opening + generate() + closing + rest.partition(closing)[2])


if __name__ == "__main__":
    main()
