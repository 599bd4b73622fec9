"""Grammars of tool calls: random texts that they allow parse as calls with valid arguments."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from gateway.text.formats import TOOL_FORMATS
from gateway.text.grammars.grammar import Fragment, any_of, grammar_source
from gateway.text.grammars.json_schema import json_expression
from gateway.text.tools.format import Tool
from shared.messages import MAX_GRAMMAR
from tests.unit.gateway.text.tools.messages import FORMATS, WHOLE_ANSWERS, Found, read
from tests.unit.gateway.text.tools.vocabulary import SPECIAL_IDS, accepts, holds, random_text

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12, "description": 'A "name" <|call|> </tool_call>'},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "metric": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "now": {},
    "get": {"type": "object", "properties": {}},
    "get_all": {
        "$defs": {"Level": {"enum": ["low", "high"]}},
        "type": "object",
        "properties": {
            "level": {"$ref": "#/$defs/Level"},
            "nothing": {"type": "null"},
            "list": {"type": "array", "items": {"type": ["number", "null"]}, "maxItems": 2},
            "inner": {
                "type": "object",
                "properties": {"class": {"const": 'x"]})'}, "deep": {"anyOf": [{"type": "boolean"}, {"enum": [1]}]}},
                "required": ["class"],
            },
        },
        "required": ["inner", "nothing"],
    },
    "search-web": {
        "type": "object",
        "properties": {"not-a-name": {"type": "string", "pattern": "^[ab]{1,3}$"}, "class": {"enum": [1, 2]}},
        "required": ["class"],
    },
    "pick": {"anyOf": [{"properties": {"a": {"enum": [1]}}, "required": ["a"]}, {"properties": {"b": {"enum": [2]}}}]},
    "price": {"properties": {"amount": {"type": "string", "pattern": DECIMAL, "maxLength": 4}}, "required": ["amount"]},
}
TOOLS = [Tool(name=name, parameters=schema) for name, schema in SCHEMAS.items()]
STRICT = [
    Tool(name=name, parameters=schema, strict=name != "now") for name, schema in SCHEMAS.items() if name != "price"
]


def read_message(name: str, text: str) -> Found:
    return read(TOOL_FORMATS[name].new_parser(TOOLS), [text])


def check_calls(found: Found, *, but: tuple[str, ...] = ("price",)) -> None:
    assert found.num_complete == len(found.calls)
    for name, values in found.values:
        assert isinstance(values, dict)
        if name not in but:
            jsonschema.validate(values, SCHEMAS[name])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("strict", [False, True])
def test_enforced_calls_parse_and_validate(name: str, strict: bool) -> None:
    tools = STRICT if strict else TOOLS
    called = set()
    form = TOOL_FORMATS[name]
    fragment = form.call_grammar(tools, SPECIAL_IDS, parallel=False)
    for seed in range(12):
        found = read_message(name, random_text(fragment, seed))
        assert len(found.calls) == 1 and found.content == ""
        check_calls(found)
        called.add(found.calls[0][0])
    assert len(called) > 2
    for seed, tool in enumerate(tools):
        forced = read_message(name, random_text(form.call_grammar([tool], SPECIAL_IDS, parallel=False), seed))
        assert [called for called, _ in forced.calls] == [tool.name]
        check_calls(forced)


@pytest.mark.parametrize("name", FORMATS)
def test_parallel_calls_follow_one_another(name: str) -> None:
    fragment = TOOL_FORMATS[name].call_grammar(TOOLS, SPECIAL_IDS, parallel=True)
    most = 0
    for seed in range(40):
        if seed > 4 and most > 1:
            break
        found = read_message(name, random_text(fragment, seed))
        assert found.calls and found.content == ""
        check_calls(found)
        most = max(most, len(found.calls))
    # A harmony message has one call, which ends the turn.
    assert most == 1 if name == "harmony" else most > 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_grammars_accept_rendered_calls(name: str, parallel: bool) -> None:
    """A format renders earlier calls as its grammar makes a model write them."""
    form = TOOL_FORMATS[name]
    several: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Oslo", "days": 2}), ("now", {})]
    for tools in (TOOLS, STRICT):
        fragment = form.call_grammar(tools, SPECIAL_IDS, parallel=parallel)
        free = form.free_grammar(tools, SPECIAL_IDS, parallel=parallel)
        for calls in ([several[0]], [several[1]]):
            text = rendered(name, calls)
            assert accepts(fragment, text) and accepts(free, text), text
        assert accepts(fragment, rendered(name, several)) is (parallel and name != "harmony")
        assert not holds(fragment, rendered(name, [("unknown", {})]))
        assert not holds(free, rendered(name, [("unknown", {})])) or name in WHOLE_ANSWERS


def rendered(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    text = TOOL_FORMATS[name].render_calls(calls)
    return text.replace("'", '"')


@pytest.mark.parametrize("name", FORMATS)
def test_maximum_number_of_tools(name: str) -> None:
    tools = [
        Tool(name=f"f{index}", parameters={"properties": {f"x{index}": {"enum": [index]}}, "required": [f"x{index}"]})
        for index in range(128)
    ]
    form = TOOL_FORMATS[name]
    for fragment in (
        form.call_grammar(tools, SPECIAL_IDS, parallel=True),
        form.free_grammar(tools, {}, parallel=False),
    ):
        assert len(grammar_source(fragment)) < MAX_GRAMMAR // 4
    fragment = form.call_grammar(tools, SPECIAL_IDS, parallel=True)
    for index in (0, 77, 127):
        assert accepts(fragment, rendered(name, [(f"f{index}", {f"x{index}": index})]))
        assert not holds(fragment, rendered(name, [(f"f{index}", {f"x{index}": index + 1})]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [True, False])
def test_structured_content_and_calls_are_distinguished(name: str, tokens: bool) -> None:
    """With response_format and tools, the message is either content or calls."""
    ids = SPECIAL_IDS if tokens else {}
    calls = TOOL_FORMATS[name].call_grammar(TOOLS, ids, parallel=True)
    answer = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}
    for schema, text in ((answer, '{"name": "Al", "n": 4}'), ({"type": "array", "items": {"type": "integer"}}, "[1]")):
        expression = any_of([json_expression(schema, "response_format"), calls.expression])
        fragment = Fragment(expression, calls.rules)
        for message in (text, rendered(name, [("now", {})])):
            assert accepts(fragment, message, tokens=tokens), message
        assert not accepts(fragment, "Hello.", tokens=tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_free_text_is_free_until_a_call_begins(name: str) -> None:
    form = TOOL_FORMATS[name]
    fragment = form.free_grammar(STRICT, SPECIAL_IDS, parallel=True)
    opening = "<|channel|>final<|message|>" if name == "harmony" else ""
    for text in ("", "Hello.", "It's { [ ``` 1 } ]\n", '{"names": 1}', "[1, 2]", "getting"):
        assert accepts(fragment, opening + text), text
    # Text that begins like a call is one; its arguments follow the schema if the tool is strict.
    good = rendered(name, [("get_weather", {"city": "Oslo"})])
    bad = rendered(name, [("get_weather", {"town": "Oslo"})])
    loose = rendered(name, [("now", {"x": [1, {"y": None}]})]).replace("None", "null")
    assert accepts(fragment, good) and not holds(fragment, bad) and accepts(fragment, loose)
    if name in WHOLE_ANSWERS:
        assert accepts(fragment, "Hello. " + bad)
    elif name == "harmony":
        before = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        assert accepts(fragment, before + good) and not holds(fragment, before + bad)
    else:
        after = "" if name == "mistral" else "\n\nDone."
        assert accepts(fragment, "Hello.\n" + good + after) and not holds(fragment, "Hello.\n" + bad)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - WHOLE_ANSWERS))
def test_without_parallel_calls_the_first_one_ends_the_message(name: str) -> None:
    form = TOOL_FORMATS[name]
    text = rendered(name, [("now", {})])
    one = form.free_grammar(TOOLS, SPECIAL_IDS, parallel=False)
    assert accepts(one, text) and not holds(one, text + "\n" + text) and not holds(one, text + " and so on")
    two = rendered(name, [("now", {}), ("now", {})])
    assert accepts(form.free_grammar(TOOLS, SPECIAL_IDS, parallel=True), two) is (name != "harmony")
    assert not accepts(one, two)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_free_text_parse_and_validate(name: str) -> None:
    form = TOOL_FORMATS[name]
    fragment = form.free_grammar(STRICT, SPECIAL_IDS, parallel=False)
    whole = rendered(name, [("get_all", {"inner": {"class": 'x"]})'}, "nothing": None})])
    # In Python's form, a bracket and the name of a tool begin a call.
    beginning = whole[: whole.index("get_all")] if name != "pythonic" else "[get_all("
    for seed in range(8):
        found = read_message(name, random_text(fragment, seed, beginning))
        assert len(found.calls) == 1 and found.content == ""
        check_calls(found, but=("now",))


def test_mistral_writes_a_space_or_an_id() -> None:
    """Covers SentencePiece tokenizers, and v11's, which has a token for the mark of an id."""
    for name, text in (
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'),
        ("mistral_named", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}"),
    ):
        form = TOOL_FORMATS[name]
        for fragment in (
            form.call_grammar(TOOLS, SPECIAL_IDS, parallel=True),
            form.free_grammar(TOOLS, SPECIAL_IDS, parallel=False),
        ):
            assert accepts(fragment, text)
        assert read_message(name, text) == Found("", [("now", "{}")], 1)
    without = {mark: token_id for mark, token_id in SPECIAL_IDS.items() if mark != "[CALL_ID]"}
    assert not accepts(TOOL_FORMATS["mistral_named"].call_grammar(TOOLS, without, parallel=True), text)
