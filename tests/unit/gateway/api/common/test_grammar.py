"""Grammar of reasoning, content and calls, and the fragments of structured output."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.common.fields import ChatFields, CompletionFields, parse_fields
from gateway.api.common.grammar import ToolGrammar, checked_grammar, output_grammar
from gateway.api.common.structured import structured_fragment
from gateway.text.grammars.checker import GrammarChecker, Vocabulary
from gateway.text.grammars.grammar import Fragment
from shared.errors import InvalidRequestError
from tests.fakes.grammar_text import allows

SPECIAL = {"</think>": 300}
CONTENT = Fragment("x_number", ("x_number: X_DIGIT+", "X_DIGIT: /[0-9]/"), param="content")
REASONING = Fragment("R_TEXT <[300]>", ("R_TEXT: /(?s:.*)/",))
CALLS = Fragment('"<call>" t_name', ("t_name: /[a-z]/",))
FREE = Fragment("t_head* T_TEXT", ('t_head[lazy]: T_TEXT "<call>"', "T_TEXT: /(?s:.*)/"))


def tools(required: bool, free: Fragment | None = FREE) -> ToolGrammar:
    return ToolGrammar(required=required, calls=CALLS, free=free)


@pytest.mark.parametrize(
    ("parts", "good", "bad"),
    [
        ((CONTENT, None, None), ["12"], ["x", "hm</think>12"]),
        ((CONTENT, None, REASONING), ["hm\n</think>12", "</think>1"], ["12", "hm</think>x"]),
        ((CONTENT, tools(False), None), ["12", "<call>f"], ["x", "1<call>f"]),
        ((CONTENT, tools(False), REASONING), ["a</think>12", "a</think><call>f"], ["<call>f"]),
        ((CONTENT, tools(True), None), ["<call>f"], ["12"]),
        ((None, tools(True), REASONING), ["hm</think><call>f"], ["hm</think>", "<call>f"]),
        ((None, tools(False), None), ["", "say <call>"], []),
    ],
)
def test_grammars_of_combined_parts(parts, good, bad):
    source = output_grammar(*parts)
    assert [text for text in good if not allows(source, text, SPECIAL)] == []
    assert [text for text in bad if allows(source, text, SPECIAL)] == []


@pytest.mark.parametrize("parts", [(None, None, None), (None, None, REASONING), (None, tools(False, None), REASONING)])
def test_free_text_has_no_grammar(parts):
    assert output_grammar(*parts) == ""


async def test_an_error_names_the_part_at_fault():
    checker = GrammarChecker(num_processes=1)
    bad = Fragment("x_bad", ("x_bad: /[/",), param="response_format.x")
    bad_tools = ToolGrammar(required=True, calls=Fragment("t_none"))
    beside = ToolGrammar(required=False, calls=bad, parts=(Fragment("x_bad", bad.rules, param="tools[1].x"),))
    own = Fragment("g", ("g: %lark {\nstart: 'x'\n}",), param="structured_outputs.grammar", source="start: 'x'")
    vocabulary = Vocabulary(400, SPECIAL)
    assert await checked_grammar(checker, CONTENT, tools(False), REASONING, vocabulary)
    for content, of_tools, param in (
        (bad, tools(False), "response_format.x"),
        (CONTENT, bad_tools, "tools"),
        (CONTENT, beside, "tools[1].x"),
        (own, None, "structured_outputs.grammar"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            await checked_grammar(checker, content, of_tools, REASONING, vocabulary)
        assert error.value.param == param
    assert "line 1" in error.value.message
    await checker.close()


def fragment(special_ids=None, **fields: Any) -> Fragment | None:
    body = {"model": "m", "messages": [], **fields}
    return structured_fragment(parse_fields(body, ChatFields), special_ids)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
CLOSE = "disable_additional_properties"
TAG = {"format": {"type": "regex", "pattern": "x"}}
STRUCTURES = {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "!"}]}

DEEP = (200, *range(980, 990), 5000)
"""Depths, some of which can be parsed but not traversed."""


def nested(depth: int) -> str:
    return '{"const":' + "[" * depth + "]" * depth + "}"


def json_schema(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a":[1,"x"]}', "{}"], ["[1]", '"x"', "1"]),
        ({"response_format": json_schema()}, ['{"a":1}', '{"a": 1, "b": 2}'], ['{"b":2}']),
        ({"response_format": json_schema(description="d", strict=False)}, ['{"a":1}'], ["{}"]),
        ({"response_format": json_schema(CLOSED, strict=True)}, ['{"a":1}'], ['{"a":1,"b":2}']),
        ({"structured_outputs": {"json": SCHEMA}}, ['{"a":1}'], ["{}"]),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, ["12"], ["x"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']),
        ({"structured_outputs": {"json": SCHEMA, CLOSE: True}}, ['{"a":1}'], ['{"a":1,"b":2}']),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_?"}}, ['{"a":_1}'], ['{"a": 1}']),
        ({"structured_outputs": {"regex": "[0-9]{2}", "json_object": False}}, ["12"], ["1"]),
        ({"structured_outputs": {"choice": ["a", "ab"]}}, ["a", "ab"], ["b"]),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, ["x"], ["y"]),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, ["x"], ["y"]),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag", **TAG}}}, ["x"], ["y"]),
        ({"structured_outputs": {"structural_tag": '{"format": {"type": "regex", "pattern": "x"}}'}}, ["x"], ["y"]),
        ({"response_format": {"type": "structural_tag", **TAG}}, ["x"], ["y"]),
        ({"response_format": {"type": "structural_tag", **STRUCTURES}}, ["hm <a>5! so"], ["<b>", "<a>x!"]),
    ],
)
def test_structured_output_accepts_and_rejects(fields, good, bad):
    found = fragment(**fields)
    assert [text for text in good if not allows(found, text)] == []
    assert [text for text in bad if allows(found, text)] == []


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": None}]
)
def test_free_text(fields):
    assert fragment(**fields) is None


def test_completions_have_both_fields():
    body = {"model": "m", "prompt": "p", "structured_outputs": {"choice": ["a"]}}
    assert structured_fragment(parse_fields(body, CompletionFields)) is not None
    body = {"model": "m", "prompt": "p", "response_format": {"type": "json_object"}}
    assert structured_fragment(parse_fields(body, CompletionFields)) is not None


FORMAT = "response_format.json_schema"
NO_SCHEMAS: list[Any] = ["abc", [], 5, True]
"""CVE-2025-48942."""
WRONG_FORMATS = [
    ("json_object", "response_format"), ({}, "response_format.type"), ({"type": "json"}, "response_format.type"),
    ({"type": "json_object", "schema": {}}, "response_format.schema"),
    ({"type": "text", "json_schema": {}}, FORMAT), ({"type": "json_schema"}, FORMAT),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, f"{FORMAT}.schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, f"{FORMAT}.name"),
    *((json_schema(schema), f"{FORMAT}.schema") for schema in NO_SCHEMAS),
    *((json_schema(name=name), f"{FORMAT}.name") for name in ("a b", "")),
    (json_schema(strict="yes"), f"{FORMAT}.strict"), (json_schema(strict=True), f"{FORMAT}.schema"),
    (json_schema({"properties": {"a": 5}}), f"{FORMAT}.schema.properties.a"),
    ({"type": "structural_tag"}, "response_format"),
]  # fmt: skip
WRONG_OUTPUTS = [
    ({}, ""), ({"json_object": False}, ""), ({"json_object": True, "regex": "a"}, ""),
    *(({"json": value}, ".json") for value in ("abc", "[]", "NaN", '{"const": 1e999}', 5)),
    *(({"json": nested(depth)}, ".json") for depth in DEEP),
    ({"json": '{"title": "' + "x" * 2**20 + '"}'}, ".json"),
    ({"regex": 5}, ".regex"), ({"choice": "a"}, ".choice"), ({"choice": ["a", 1]}, ".choice[1]"),
    ({"choice": []}, ".choice"), ({"grammar": ""}, ".grammar"), ({"backend": "x", "regex": "a"}, ".backend"),
    ({"regex": "a", "whitespace_pattern": " "}, ".whitespace_pattern"),
    ({"regex": "a", "disable_any_whitespace": True}, ".disable_any_whitespace"),
    ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, ".disable_any_whitespace"),
    *(({"json_object": True, "whitespace_pattern": white}, ".whitespace_pattern")
      for white in (" {1000000000}", " " * 300)),
    ({"structural_tag": "{"}, ".structural_tag"),
    ({"structural_tag": r'{"format": {"type": "regex", "pattern": "\ud800"}}'}, ".structural_tag"),
    ({"structural_tag": {"type": "x"}}, ".structural_tag.type"),
    ({"structural_tag": {"formats": {}}}, ".structural_tag.formats"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"response_format": value}, param) for value, param in WRONG_FORMATS),
        *(({"structured_outputs": value}, f"structured_outputs{param}") for value, param in WRONG_OUTPUTS),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        *(({name: "a"}, name) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    ],
)
def test_a_refusal_names_the_field(fields, param):
    with pytest.raises(InvalidRequestError) as error:
        fragment(**fields)
    assert error.value.param == param and param.split(".")[0] in error.value.message
    if param.startswith("guided_"):
        assert "structured_outputs" in error.value.message
