"""Values that are not JSON (Python literals, Qwen's tags, Gemma's marks), for any division into pieces."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.text.formats import TOOL_FORMATS
from gateway.text.message_parser import ToolParser
from gateway.text.tools.format import Tool
from tests.unit.gateway.text.tools.messages import Found, read

TOOL = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "color": {"enum": ["red", "blue"]},
            "number": {"type": "integer"},
            "flag": {"type": "boolean"},
            "maybe": {"type": ["string", "null"]},
            "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"oneOf": [{"type": "string"}, {"type": "number"}, {"$ref": "#/$defs/X"}]},
            "list": {"type": "array"},
        },
    },
)
GEMMA = {
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
}


def new_parser(name: str) -> ToolParser:
    return TOOL_FORMATS[name].new_parser([TOOL])


def whole(name: str, text: str) -> Found:
    """Read the text at once, by characters, and in pieces of three characters."""
    found = read(new_parser(name), [text])
    assert read(new_parser(name), text) == found
    assert read(new_parser(name), [text[start : start + 3] for start in range(0, len(text), 3)]) == found
    return found


def only_values(name: str, text: str) -> Any:
    found = whole(name, text)
    assert found.num_complete == 1 and found.content == ""
    ((called, values),) = found.values
    assert called == "f"
    return values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'\x41\u00e9\U0001F600'", "Aé😀"),
        (r"'\n\t\r\b\f\a\v\\\'\"'", "\n\t\r\b\f\a\v\\'\""),
        (r"'\d\q'", r"\d\q"),
        ("'a\\\nb'", "ab"),
        (r"'\u00'", r"\u00"),
        (r"'\UFFFFFFFF'", r"\UFFFFFFFF"),
        ('"""a"b""c"""', 'a"b""c'),
        ("'''it's'''", "it's"),
        ('""', ""),
        ("+5", 5),
        ("-.5", -0.5),
        ("5.", 5),
        ("007", 7),
        ("1_000", 1000),
        ("1e5", 1e5),
        ("(1, 2,)", [1, 2]),
        ("[ ]", []),
        ("{ }", {}),
        ("{'a' : [True, False , None],}", {"a": [True, False, None]}),
        ("true", True),
        ("null", None),
    ],
)
def test_literals(text: str, value: Any) -> None:
    assert only_values("pythonic", f"[f(x={text})]") == {"x": value}


@pytest.mark.parametrize(
    "text", ["x", "1.2.3", "e5", "0x10", "--1", "'a' 'b'", "[1 2]", "{1: 2}", "{'a'}", "[1", "f()", "*a"]
)
def test_values_that_are_not_literals_end_the_call(text: str) -> None:
    found = whole("pythonic", f"[f(y=1, x={text})] so")
    assert found.num_complete == 0 and found.content.endswith("so") and found.calls[0][1].startswith('{"y": 1, "x": ')


def test_positional_arguments_get_the_names_of_the_first_properties() -> None:
    expected = {"text": "Oslo", "color": "red", "number": 5}
    assert only_values("pythonic", "[f('Oslo', \"red\", number=5)]") == expected
    assert only_values("gemma", "```tool_code\nprint(f('Oslo', 'red', number=5))\n```") == expected
    # The names of the parameters of an undeclared function are unknown.
    found = whole("gemma", "```tool_code\ng('Oslo')\n```")
    assert found.num_complete == 0 and found.calls == [("g", "{")] and found.content.startswith("'Oslo')")


def tags(**values: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{lines}</function>\n</tool_call>"


def test_values_between_tags_have_the_types_of_the_schema() -> None:
    text = tags(
        text="5", color="red", number="5", flag="True", maybe="null", list='["a", 1]', other="{x", more='{"a": 1}'
    )
    assert only_values("qwen3_coder", text) == {
        "text": "5",
        "color": "red",
        "number": 5,
        "flag": True,
        "maybe": None,
        "list": ["a", 1],
        "other": "{x",
        "more": {"a": 1},
    }
    assert only_values("qwen3_coder", tags(maybe="so", flag="false", number="many", other="NaN", more="")) == {
        "maybe": "so",
        "flag": False,
        "number": "many",
        "other": "NaN",
        "more": "",
    }
    assert only_values("qwen3_coder", tags()) == {}
    for exact in ("", "  ", "\na\n\n", "é😀</param", '\n"\n"<tool_call>'):
        assert only_values("qwen3_coder", tags(text=exact)) == {"text": exact}


@pytest.mark.parametrize("name", ["maybe", "optional"])
def test_a_value_that_looks_like_json_is_text_where_only_that_is_allowed(name: str) -> None:
    """Python's `str | None` gives such a schema."""
    for text, value in (("5", "5"), ("True", "True"), ("[1]", "[1]"), ("null", None), ("None", None), ("Oslo", "Oslo")):
        assert only_values("qwen3_coder", tags(**{name: text})) == {name: value}
    assert only_values("qwen3_coder", tags(either="5")) == {"either": 5}
    assert only_values("qwen3_coder", tags(either="[1]")) == {"either": [1]}


def test_malformed_calls_between_tags() -> None:
    found = whole("qwen3_coder", "Hi <tool_call>\n<function=f>\n<parameter=text>\nOs")
    assert found == Found("Hi", [("f", '{"text": "Os')], 0)
    found = whole("qwen3_coder", "<tool_call>\n<function=f>\nwhat\n</function>\n</tool_call>")
    assert found == Found("what\n</function>\n</tool_call>", [("f", "{")], 0)
    assert whole("qwen3_coder", "<tool_call>\n<function=").content == "<tool_call>\n<function="
    two = whole("qwen3_coder", "See:\n" + tags(number="1") + "\n" + tags(number="2"))
    assert two == Found("See:", [("f", '{"number": 1}'), ("f", '{"number": 2}')], 2)


@pytest.mark.parametrize("name", GEMMA)
def test_calls_between_marks(name: str) -> None:
    opening, closing, quote = GEMMA[name]
    one = f"{opening}call:f{{a:{quote}x}}]{quote}}}{closing}"
    mixed = f'{opening}call:f{{text:{quote}é\n"😀{quote},n:[1,{{k:true}}],v:{{"a": [-0.5, null]}}}}{closing}'
    assert only_values(name, mixed) == {"text": 'é\n"😀', "n": [1, {"k": True}], "v": {"a": [-0.5, None]}}
    assert whole(name, f"Hi.{one}{one}\nDone.") == Found("Hi.\nDone.", [("f", '{"a": "x}]"}')] * 2, 2)
    assert whole(name, f"{opening}call:f{{}}{closing}") == Found("", [("f", "{}")], 1)
    assert whole(name, f"{opening}call:f{{a:{quote}x") == Found("", [("f", '{"a": "x')], 0)
    assert whole(name, f"{opening}call: f").content == f"{opening}call: f"
    assert whole(name, f"{opening}call:f{{a:what?}}{closing}") == Found("what?}" + closing, [("f", '{"a": ')], 0)
