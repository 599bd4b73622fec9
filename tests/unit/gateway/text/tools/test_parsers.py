"""Parsers of all formats: the same message for any division into pieces, and no lost text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.formats import TOOL_FORMATS
from tests.unit.gateway.text.tools.messages import FORMATS, NAMES, TOOLS, WHOLE_ANSWERS, Found, read_with

MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.marks} | {"```", "[", "]", "{", "}", "\\", '"'})
# Marks inside strings are text, except those with which the format itself ends strings.
texts = st.lists(st.sampled_from([*MARKS, "'", "a", "é", "😀", "\n", " ", "\\n", "x: 1", "\x00"]), max_size=5).map(
    "".join
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(["city", "days", "x_1"]), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3)
said = st.sampled_from(["", "Let me see.", "a < b\n\nand [1]", "{ is a brace", "`code`"])


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *edges], [*edges, len(text)])]


def written(name: str, called: list[tuple[str, dict[str, Any]]], before: str, after: str) -> str:
    return (
        before
        + ("\n" if before and called else "")
        + (TOOL_FORMATS[name].render_calls(called) if called else "")
        + after
    )


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_calls_parse_for_any_division(name: str, data: st.DataObject) -> None:
    called = data.draw(calls)
    before = "" if name in WHOLE_ANSWERS and called else data.draw(said)
    after = data.draw(st.sampled_from(["", "\n", "\nDone."]))
    text = written(name, called, before, after)
    found = read_with(TOOL_FORMATS[name], text)
    assert found.values == called
    assert found.num_complete == len(called)
    if called:
        assert found.content == before + ("\n" if before and after.strip() else "") + after.strip()
    else:
        assert found.content == before + after
    pieces = cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=12)))
    assert read_with(TOOL_FORMATS[name], *pieces) == found
    assert read_with(TOOL_FORMATS[name], *text) == found


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_text_gives_the_same_message_for_any_division(name: str, data: st.DataObject) -> None:
    beginnings = ["f(", "f", "a=", '"name": "f"', '"arguments": ', '"x"', "1", ",", ":", " ", "\n"]
    pieces = st.sampled_from([*TOOL_FORMATS[name].marks, *MARKS, *beginnings])
    text = "".join(data.draw(st.lists(pieces | st.text(max_size=3), max_size=14)))
    found = read_with(TOOL_FORMATS[name], text)
    assert read_with(TOOL_FORMATS[name], *text) == found
    assert read_with(TOOL_FORMATS[name], *cut(text, data.draw(st.lists(st.integers(0, 1000), max_size=6)))) == found
    if not found.calls:
        assert found.content == text


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_messages_are_prefixes_of_the_whole(name: str) -> None:
    called = [("get_weather", {"city": 'A "b" {c} [d] é', "days": [1, {"x": None}]}), ("f", {})]
    text = written(name, called, "" if name in WHOLE_ANSWERS else "Let me see.", "")
    whole = read_with(TOOL_FORMATS[name], text)
    assert whole.num_complete == 2
    shown = 0
    for end in range(len(text)):
        found = read_with(TOOL_FORMATS[name], text[:end])
        assert found == read_with(TOOL_FORMATS[name], *text[:end])
        assert is_beginning(found, whole), text[:end]
        shown += bool(found.calls)
        if not found.calls:
            assert found.content == text[:end]
    assert shown > len(text) // 3


def is_beginning(found: Found, whole: Found) -> bool:
    for index, (name, text) in enumerate(found.calls):
        if name != whole.calls[index][0] or not whole.calls[index][1].startswith(text):
            return False
        if index < found.num_complete and text != whole.calls[index][1]:
            return False
    return found.num_complete <= len(found.calls)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_streamed(name: str) -> None:
    """The name is streamed before the arguments, and the arguments before they are complete."""
    form = TOOL_FORMATS[name]
    text = form.render_calls([("f", {"city": "x" * 200})])
    parser = form.new_parser(TOOLS)
    sizes = [sum(len(delta.arguments) for delta in parser.push(char)[1]) for char in text]
    assert max(sizes) < 20 and sum(sizes) > 200
