"""Parsers on hostile model output: linear time, no evaluation, no lost text, no exception."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gateway.text.tools
from gateway.text.formats import TOOL_FORMATS
from tests.fakes.growth import expect_linear
from tests.unit.gateway.text.tools.messages import FORMATS, TOOLS, Found, read_with

_ENDLESS = {
    "tabs in an argument": lambda n: "[A(A=" + "\t" * n,
    "tabs in an argument of a tool": lambda n: "[f(a=" + "\t" * n,
    "marks": lambda n: "<tool_call>" * (n // 11),
    "braces": lambda n: "{" * n,
    "brackets": lambda n: "[" * n,
    "a call of braces": lambda n: '<tool_call>{"name": "f", "arguments": ' + "{" * n,
    "a call of nested lists": lambda n: '{"name": "f", "arguments": {"a": ' + "[" * n,
    "nested Python": lambda n: "[f(a=" + "[({" * (n // 3),
    "an unclosed string": lambda n: '{"name": "f", "arguments": {"a": "' + "x" * n,
    "an unclosed Python string": lambda n: "[f(a='" + "\\'" * (n // 2),
    "an endless name": lambda n: '<tool_call>{"name": "' + "f" * n,
    "an endless Python name": lambda n: "[" + "f" * n,
    "an endless number": lambda n: "[f(a=" + "0" * n,
    "backslashes": lambda n: '[TOOL_CALLS][{"name": "f", "arguments": {"a": "' + "\\" * n,
    "quotes": lambda n: '{"name": "f", "arguments": {' + '"' * n,
    "beginnings of marks": lambda n: "<tool_cal" * (n // 9),
    "white space": lambda n: " \n" * (n // 2),
    "white space before a call": lambda n: " " * n + '<tool_call>{"name": "f"}',
    "lists of Mistral": lambda n: "[TOOL_CALLS][" * (n // 13),
    "names of Mistral": lambda n: "[TOOL_CALLS]" + "f" * n,
    "calls of DeepSeek": lambda n: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" * (n // 39),
    "names of DeepSeek": lambda n: "<｜tool▁call▁begin｜>" + "f" * n,
    "headers": lambda n: "<|channel|>" * (n // 11),
    "a header": lambda n: "<|start|>assistant<|channel|>commentary to=functions." + "f" * n,
    "fences": lambda n: "```tool_code\n" * (n // 13),
    "many calls": lambda n: '<tool_call>{"name":"f"}</tool_call>' * (n // 35),
    "many keys": lambda n: '{"id": "x", ' + '"type": 1, ' * (n // 11),
    "a value between tags": lambda n: "<tool_call><function=f><parameter=a>" + "x\n" * (n // 2),
    "a text between tags": lambda n: "<tool_call><function=f><parameter=text>" + "</param" * (n // 7),
    "functions": lambda n: "<tool_call><function=" * (n // 21),
    "parameters": lambda n: "<tool_call><function=f>" + "<parameter=a>1</parameter>" * (n // 26),
    "a text between marks": lambda n: "<start_function_call>call:f{a:<escape>" + "<esc" * (n // 4),
    "objects between marks": lambda n: "<|tool_call>call:f{a:" + "{b:" * (n // 3),
    "keys between marks": lambda n: "<|tool_call>call:f{" + "k" * n,
    "a fence of text": lambda n: "```json\n" + "a" * n,
}

_GENERAL = ("tabs in an argument", "marks", "braces", "beginnings of marks")


@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear(name: str) -> None:
    """CVE-2025-48887."""
    form = TOOL_FORMATS[name]
    # Texts that are plain content take the same path in all formats; a few of them suffice.
    hostile = {
        what: make
        for what, make in _ENDLESS.items()
        if what in _GENERAL or (is_read(name, make(600)) and (name == "hermes" or "white space" not in what))
    }
    assert len(hostile) > len(_GENERAL)
    for make in hostile.values():
        expect_linear(lambda size, make=make: read_with(form, *in_pieces(make(size))), 4_000, 40_000)


def in_pieces(text: str) -> list[str]:
    return [text[start : start + 16] for start in range(0, len(text), 16)]


def is_read(name: str, text: str) -> bool:
    """Return True if the format's parser does not simply pass the text on as content."""
    parser = TOOL_FORMATS[name].new_parser(TOOLS)
    content, calls = parser.push(text)
    return bool(calls) or len(content) < len(text) - 40


@pytest.mark.parametrize("name", ["pythonic", "gemma"])
def test_python_is_not_evaluated(name: str, tmp_path: Path) -> None:
    """CVE-2025-9141: an expression that is not a literal ends the call and is content."""
    file = tmp_path / "x"
    for value in (
        f"__import__('os').system('touch {file}')",
        f"open({str(file)!r}, 'w')",
        "1 + 1",
        "lambda: 0",
        "[x for x in ()]",
    ):
        text = f"[f(a=1, b={value})]" if name == "pythonic" else f"```tool_code\nf(a=1, b={value})\n```"
        found = read_with(TOOL_FORMATS[name], text)
        assert [called for called, _ in found.calls] == ["f"] and found.num_complete == 0
        assert found.calls[0][1].startswith('{"a": 1, "b": ')
        assert found.content or "[" in found.calls[0][1]
    assert not file.exists()


def test_nothing_evaluates() -> None:
    for path in Path(gateway.text.tools.__file__).parent.glob("*.py"):
        assert not re.search(r"\b(eval|exec|literal_eval|compile)\(", path.read_text().replace("re.compile(", "")), path


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "<tool_call>nothing</tool_call>", Found("<tool_call>nothing</tool_call>", [], 0)),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', Found('<tool_call>{"name": 5}</tool_call>', [], 0)),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', Found("", [("f", "{}")], 1)),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', Found("", [("f", "{}")], 1)),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', Found("", [("f", '{"a": 1}')], 1)),
        ("hermes", '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>', Found("", [("f", "{}")], 1)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>.', Found(".", [("f", "{}")], 1)),
        ("json", '{{"name": "f"}}', Found("", [("f", "{}")], 1)),
        ("json", '{{"name": "no_such"}}', Found('{{"name": "no_such"}}', [], 0)),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}', Found("", [("f", "{}")], 1)),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', Found("", [("f", '{"a": 1}')], 1)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}', Found("]}", [("f", '{"a": 1')], 0)),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> So.',
            Found("So.", [("f", '{"a": 1')], 0),
        ),
        ("hermes", '<tool_call>{"name":"no_such","arguments":{}}', Found("", [("no_such", "{}")], 1)),
        ("hermes", 'Hi <tool_call>{"name":"f"}</tool_call>, then', Found("Hi , then", [("f", "{}")], 1)),
        ("json", '{"name": "no_such", "arguments": {}}', Found('{"name": "no_such", "arguments": {}}', [], 0)),
        ("json", '{"answer": 42}', Found('{"answer": 42}', [], 0)),
        ("json", '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', Found("", [("f", '{"a": 1}')], 1)),
        ("json", '[{"name": "f"}, 5]', Found(", 5]", [("f", "{}")], 1)),
        ("llama3_json", '<|python_tag|>{"name": "new", "parameters": {}}', Found("", [("new", "{}")], 1)),
        ("llama3_json", '<|python_tag|>print("x")', Found('<|python_tag|>print("x")', [], 0)),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', Found("", [("f", '{"a": 1}')], 1)),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}", Found("", [("f", "{}")], 1)),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', Found("", [("f", "{}")], 1)),
        ("mistral", "[TOOL_CALLS]f{}", Found("", [("f", "{}")], 1)),
        ("pythonic", "[link](http://x)", Found("[link](http://x)", [], 0)),
        ("pythonic", "<|python_start|>[any(x=1)]<|python_end|>", Found("", [("any", '{"x": 1}')], 1)),
        ("pythonic", "[f(1)]", Found("1)]", [("f", "{")], 0)),
        ("gemma", "```tool_code\nprint(f(a=.5))\n```", Found("", [("f", '{"a": 0.5}')], 1)),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>x", Found("<｜tool▁calls▁begin｜>x", [], 0)),
    ],
)
def test_odd_calls(name: str, text: str, expected: Found) -> None:
    found = read_with(TOOL_FORMATS[name], text)
    assert found == expected
    assert read_with(TOOL_FORMATS[name], *text) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_lone_surrogates_are_replaced(name: str) -> None:
    """A lone surrogate, which a model can write as an escape, has no UTF-8 encoding."""
    for text in (
        '<tool_call>{"name": "\\ud800", "arguments": "{\\"a\\": \\"\\udfff\\"}"}</tool_call>',
        '[TOOL_CALLS][{"name": "\\ud800"}]',
        '<|python_tag|>{"name": "\\ud800"}',
        '<tool_call><function=f><parameter=a>"\\ud800"</parameter></function></tool_call>',
        "[f(a='\\ud800')]",
        "```tool_code\nf(a='\\ud800', b='\\U0000dc00')\n```",
    ):
        found = read_with(TOOL_FORMATS[name], text)
        found.content.encode()
        for called in found.calls:
            "".join(called).encode()
