"""docs/API.md against the code, both ways: endpoints, fields with their types, and what is refused.

`python -m tests.architecture.test_api_document` writes the table of refused fields; the others are written by hand.
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

from gateway.api.anthropic.fields import NO_EFFECT as TAKEN
from gateway.api.anthropic.fields import REFUSED, ConversationFields, MessagesFields
from gateway.api.common.fields import ChatFields, CompletionFields, DetokenizeFields, SamplingFields, TokenizeFields
from gateway.api.common.refused import NO_EFFECT, UNSUPPORTED
from gateway.api.openai.embeddings import EmbeddingFields
from gateway.api.responses.fields import InputFields, InputTokensFields, ResponseFields
from gateway.app import ROUTES
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
    """The rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def part(name: str) -> list[list[str]]:
    text = DOCUMENT.read_text("utf-8")
    return cells(text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0])


def described(kind: object) -> str:
    """A type as the document calls it."""
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


def refused_table() -> str:
    """The table of what is refused, from the code."""
    kinds = {"chat": ChatFields, "completions": CompletionFields}
    lines = ["", "| field | refused by | reason, or replacement | accepted values |", "|---|---|---|---|"]
    for name in sorted(UNSUPPORTED):
        by = [kind for kind, struct in kinds.items() if name not in struct.__struct_fields__]
        taken = ", ".join(f"`{json.dumps(value)}`" for value in NO_EFFECT.get(name, ()))
        if by:
            lines.append(f"| `{name}` | {' and '.join(by)} | {UNSUPPORTED[name] or 'not supported'} | {taken} |")
    return "\n".join(lines) + "\n\n"


def test_refused():
    text = DOCUMENT.read_text("utf-8")
    written = text.partition("<!-- refused -->\n")[2].partition("<!-- /refused -->")[0]
    assert written == refused_table(), "python -m tests.architecture.test_api_document writes it"


def test_refused_by_messages():
    written = {row[0].strip("`"): row[1:] for row in part("messages refused")}
    assert written == {
        name: [why or "not supported", ", ".join(f"`{json.dumps(value)}`" for value in TAKEN.get(name, ()))]
        for name, why in REFUSED.items()
    }
    assert not set(REFUSED) & set(MessagesFields.__struct_fields__)


def test_nothing_is_both_taken_everywhere_and_refused():
    assert not set(UNSUPPORTED) & set(ChatFields.__struct_fields__) & set(CompletionFields.__struct_fields__)


@pytest.mark.parametrize(
    ("openai", "ours"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, ChatFields),
        (chat_create_params.CompletionCreateParamsStreaming, ChatFields),
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionFields),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionFields),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingFields),
    ],
)
def test_every_field_of_openais_package_is_taken_or_refused_with_a_reason(openai, ours):
    assert set(typing.get_type_hints(openai)) - set(ours.__struct_fields__) - set(UNSUPPORTED) == set()


def structs(kind: object) -> set[type[msgspec.Struct]]:
    """Those that a field of this type may be."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {kind}
    return set().union(*(structs(inner) for inner in typing.get_args(kind)))


def test_null_counts_as_absent_in_objects_too():
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
    text = DOCUMENT.read_text("utf-8")
    head, opening, rest = text.partition("<!-- refused -->\n")
    DOCUMENT.write_text(head + opening + refused_table() + "<!-- /refused -->" + rest.partition("<!-- /refused -->")[2])


if __name__ == "__main__":
    main()
