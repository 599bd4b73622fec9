"""What /v1/responses refuses: docs/API.md against the code, and the code against what OpenAI's package can send.

`python -m tests.architecture.test_responses_document` writes the table.
"""

from __future__ import annotations

import json
import typing

import pytest
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

from gateway.api.common.fields import FunctionField
from gateway.api.responses.fields import (
    INCLUDABLE,
    REFUSED,
    InputTokensFields,
    ReasoningField,
    ResponseFields,
    TextField,
)
from gateway.api.responses.items import _FIELDS, _PARTS
from tests.architecture.source import ROOT

DOCUMENT = ROOT / "docs" / "API.md"
OPENING, CLOSING = "<!-- responses refused -->\n", "<!-- /responses refused -->"
PARTS = [
    ("", response_create_params.ResponseCreateParamsNonStreaming, set(ResponseFields.__struct_fields__)),
    ("", InputTokenCountParams, set(InputTokensFields.__struct_fields__)),
    ("reasoning.", Reasoning, set(ReasoningField.__struct_fields__)),
    ("text.", ResponseTextConfigParam, set(TextField.__struct_fields__)),
    ("stream_options.", StreamOptions, set()),
    ("tools[].", FunctionToolParam, {*FunctionField.__struct_fields__, "type"}),
]


def table() -> str:
    """Return the table of refused fields."""
    lines = ["", "| field | reason, or replacement | accepted values |", "|---|---|---|"]
    for name, refusal in sorted(REFUSED.items()):
        taken = ", ".join(f"`{json.dumps(value)}`" for value in refusal.accepted)
        lines.append(f"| `{name}` | {refusal.reason} | {taken} |")
    return "\n".join(lines) + "\n\n"


def test_what_is_refused_is_in_the_document():
    written = DOCUMENT.read_text("utf-8").partition(OPENING)[2].partition(CLOSING)[0]
    assert written == table(), "python -m tests.architecture.test_responses_document writes it"


@pytest.mark.parametrize(("outer", "openai", "taken"), PARTS, ids=lambda one: getattr(one, "__name__", None))
def test_every_field_of_openais_package_is_taken_or_refused_with_a_reason(outer, openai, taken):
    known = set(typing.get_type_hints(openai))
    refused = {name.removeprefix(outer) for name in REFUSED if outer or "." not in name}
    assert known - taken - refused == set()


def test_no_field_is_both_taken_and_refused():
    assert not set(REFUSED) & (set(ResponseFields.__struct_fields__) | set(InputTokensFields.__struct_fields__))


def test_what_can_be_included_is_openais_and_in_the_document():
    assert set(INCLUDABLE) <= set(typing.get_args(ResponseIncludable))
    text = DOCUMENT.read_text("utf-8")
    assert all(f"`{name}`" in text for name in INCLUDABLE)


def test_items_and_their_parts_have_the_fields_that_openais_package_sends():
    """Of the types that are taken; others are refused by their type. What is taken beside them, its models write."""
    common = {"type", "id", "status"}
    for item in typing.get_args(ResponseInputItemParam):
        hints = typing.get_type_hints(item)
        for kind in typing.get_args(hints.get("type")):
            if kind in _FIELDS:
                assert set(hints) - common <= {*_FIELDS[kind]}, kind
    for part in (ResponseInputTextParam, ResponseOutputTextParam, ResponseOutputRefusalParam):
        hints = typing.get_type_hints(part)
        (kind,) = typing.get_args(hints["type"])
        assert set(hints) - {"type"} <= {*_PARTS[kind]}, kind


def main() -> None:
    head, opening, rest = DOCUMENT.read_text("utf-8").partition(OPENING)
    DOCUMENT.write_text(head + opening + table() + CLOSING + rest.partition(CLOSING)[2])


if __name__ == "__main__":
    main()
