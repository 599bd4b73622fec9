"""Reasoning splitters: each format, any division into pieces, linear time, and grammars."""

from __future__ import annotations

import itertools

import pytest

from gateway.text.formats import reasoning_format
from gateway.text.grammars.grammar import Fragment
from gateway.text.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning, reasoning_fragment
from shared.errors import ConfigurationError
from tests.fakes.grammar_text import allows
from tests.fakes.growth import expect_linear

THINK = REASONING_FORMATS["think"]
GRANITE = REASONING_FORMATS["granite"]
NAMES = sorted(REASONING_FORMATS)
MARKED = [name for name in NAMES if REASONING_FORMATS[name].splitter is None]


def split(marks: ReasoningFormat, pieces: list[str], opened: bool = False) -> tuple[str, str]:
    splitter = marks.new_splitter(opened)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(aloud for _, aloud in parts)


def pairs(marks: ReasoningFormat) -> list[tuple[str, str]]:
    return list(itertools.product(marks.starts, marks.ends))


@pytest.mark.parametrize("name", MARKED)
def test_each_format_is_split(name: str) -> None:
    marks = REASONING_FORMATS[name]
    for start, end in pairs(marks):
        text = f"{start}\nTwo and\n\ntwo. \n{end}\n\nFour. \n"
        for pieces in ([text], list(text), *([text[:place], text[place:]] for place in range(len(text)))):
            assert split(marks, pieces) == ("Two and\n\ntwo.", "Four. \n")
        after = text.removeprefix(start)
        assert split(marks, list(after), opened=True) == ("Two and\n\ntwo.", "Four. \n")
        # Some models repeat the mark with which the prompt ends.
        assert split(marks, list(text), opened=True) == ("Two and\n\ntwo.", "Four. \n")


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("", False, ("", "")),
        ("Four.", False, ("", "Four.")),
        (" \n Four. ", False, ("", " \n Four. ")),
        (" \n", False, ("", " \n")),
        ("<thin", False, ("", "<thin")),
        (" <thing>", False, ("", " <thing>")),
        ("\n<think>a</think>b", False, ("a", "b")),
        ("<think></think>b", False, ("", "b")),
        ("<think>\n\n</think>\n\nb", False, ("", "b")),
        ("<think>a\n", False, ("a", "")),
        ("<think>a</thin", False, ("a</thin", "")),
        ("a </thin", True, ("a </thin", "")),
        ("<think>a </ think> </think>b", False, ("a </ think>", "b")),
        ("<think>", False, ("", "")),
        ("<thi", True, ("<thi", "")),
        ("a", True, ("a", "")),
        (" ", True, ("", "")),
        ("</think>b", True, ("", "b")),
        # Later marks are content.
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("Say <think>x</think>", False, ("", "Say <think>x</think>")),
        ("b</think>c", False, ("", "b</think>c")),
    ],
)
def test_reasoning_is_split_from_content(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text), *([text[:place], text[place:]] for place in range(len(text)))):
        assert split(THINK, pieces, opened) == expected


@pytest.mark.parametrize("unit", [" ", "</think", "</", "<think>", "\n a", "Here's my res"])
@pytest.mark.parametrize("marks", [THINK, GRANITE])
def test_time_is_linear_in_hostile_text(unit: str, marks: ReasoningFormat) -> None:
    expect_linear(lambda count: split(marks, [marks.starts[0], *([unit] * count)]), 4_000, 16_000)


def test_in_reasoning_describes_the_next_text() -> None:
    splitter = THINK.new_splitter(False)
    states, done = [], []
    for piece in ("\n", "<think>", "a", "</thi", "nk>", "\n", "b"):
        splitter.push(piece)
        states.append(splitter.in_reasoning)
        done.append(splitter.done)
    assert states == [False, True, True, True, False, False, False]
    assert done == [False] * 6 + [True]
    assert THINK.new_splitter(True).in_reasoning


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_open_the_reasoning_are_detected(name: str) -> None:
    marks = REASONING_FORMATS[name]
    assert all(marks.is_open(f"assistant\n{text}") for text in marks.opens)
    for start, end in pairs(marks):
        assert marks.is_open(f"assistant\n{start}") and marks.is_open(f"assistant\n{start}\n")
        assert not marks.is_open(f"{start}\n\n{end}\n\n") and not marks.is_open("assistant\n")


@pytest.mark.parametrize("name", NAMES)
def test_formats_are_detected(name: str) -> None:
    marks = REASONING_FORMATS[name]
    template = "{{ message.content.split('" + (marks.sign or marks.ends[0]) + "')[-1] }}"
    assert detect_reasoning(template, {}) is marks
    assert detect_reasoning("{{ message.content }}", {"<|im_end|>": 2}) is None
    # A vocabulary with both marks is enough.
    assert detect_reasoning("", {"<think>": 7, "</think>": 8}) is THINK
    assert detect_reasoning("", {"<think>": 7}) is None


def test_flags() -> None:
    assert reasoning_format("auto", "x</think>", {}) is THINK
    assert reasoning_format("none", "x</think>", {}) is None
    assert reasoning_format("deepseek-r1", "", {}) is THINK
    with pytest.raises(ConfigurationError, match=r"--reasoning-parser is 'r2'; known are auto, none, .*think"):
        reasoning_format("r2", "", {})


def matcher(marks: ReasoningFormat, opened: bool, tokens: bool):
    ids = {marks.starts[0].rstrip(): 300, marks.ends[0]: 301} if tokens else {}
    reasoning = reasoning_fragment(marks, opened, ids)
    fragment = Fragment(f'{reasoning.expression} "yes"', reasoning.rules)
    return lambda text: allows(fragment, text, ids)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [(name, tokens) for name in NAMES for tokens in (True, False) if name != "granite" or not tokens],
)
def test_the_grammar_constrains_text_after_reasoning(name: str, tokens: bool) -> None:
    marks = REASONING_FORMATS[name]
    start, end = marks.starts[0], marks.ends[0]
    accepts = matcher(marks, opened=False, tokens=tokens)
    assert accepts("yes")
    for between in ("", "\n", "\n\n"):
        assert accepts(f"{start}\nLet me see: no < or > {{}}.\n{end}{between}yes")
    assert not accepts(f"{start}why{end}no") and not accepts(f"{start}yes") and not accepts("no")
    assert not accepts(f"{start}why{end}" + "\n" * 20 + "yes")
    accepts = matcher(marks, opened=True, tokens=tokens)
    assert accepts(f"\nwhy{end}\nyes") and not accepts("yes")
