"""One grammar for reasoning, content and calls, and what structured output asks for."""

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
def test_parts_together(parts, good, bad):
    source = output_grammar(*parts)
    assert [text for text in good if not allows(source, text, SPECIAL)] == []
    assert [text for text in bad if allows(source, text, SPECIAL)] == []


@pytest.mark.parametrize("parts", [(None, None, None), (None, None, REASONING), (None, tools(False, None), REASONING)])
def test_nothing_is_demanded_of_free_text(parts):
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
STRUCTURES = {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "!"}]}

DEEP = (200, *range(980, 990), 5000)
"""Among them what can be parsed, and not walked."""


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
        ({"response_format": {"type": "structural_tag", **STRUCTURES}}, ["hm <a>5!"], ["<b>"]),
    ],
)
def test_what_is_asked_for(fields, good, bad):
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": json_schema("abc")}, "response_format.json_schema.schema"),  # CVE-2025-48942
        ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(5)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(True)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(name="")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(strict=True)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"properties": {"a": 5}})}, "response_format.json_schema.schema.properties.a"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "abc"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "NaN"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"const": 1e999}'}}, "structured_outputs.json"),
        *(({"structured_outputs": {"json": nested(depth)}}, "structured_outputs.json") for depth in DEEP),
        ({"structured_outputs": {"json": '{"title": "' + "x" * 2**20 + '"}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"backend": "x", "regex": "a"}}, "structured_outputs.backend"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " {1000000000}"}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " " * 300}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": r'{"format": {"type": "regex", "pattern": "\ud800"}}'}},
            "structured_outputs.structural_tag",
        ),
        ({"structured_outputs": {"structural_tag": {"type": "x"}}}, "structured_outputs.structural_tag.type"),
        ({"structured_outputs": {"structural_tag": {"formats": {}}}}, "structured_outputs.structural_tag.formats"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "a"}, "guided_grammar"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(InvalidRequestError) as error:
        fragment(**fields)
    assert error.value.param == param and param.split(".")[0] in error.value.message
    if param.startswith("guided_"):
        assert "structured_outputs" in error.value.message
