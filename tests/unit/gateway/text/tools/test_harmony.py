"""Harmony messages (gpt-oss): reasoning, content and calls."""

from __future__ import annotations

import pytest

from gateway.text.formats import TOOL_FORMATS
from gateway.text.grammars.grammar import Fragment, any_of
from gateway.text.grammars.json_schema import json_expression
from gateway.text.reasoning import REASONING_FORMATS, detect_reasoning, reasoning_fragment
from gateway.text.tools.format import Tool
from gateway.text.tools.harmony import ANALYSIS, END, FINAL, OPENING, HarmonySplitter, final_message
from tests.fakes.growth import expect_linear
from tests.unit.gateway.text.tools import templates
from tests.unit.gateway.text.tools.messages import Found, calls_of
from tests.unit.gateway.text.tools.vocabulary import SPECIAL_IDS, accepts, holds

HARMONY = TOOL_FORMATS["harmony"]
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
COMMENTARY = "<|channel|>commentary<|message|>"


def split(pieces: list[str], *, opened: bool = False) -> tuple[str, Found]:
    """Return the reasoning, and the message that the parser reads from the rest."""
    splitter, parser = HarmonySplitter(opened), HARMONY.new_parser([])
    reasoning, content, deltas = "", "", []
    for piece in [*pieces, None]:
        thought, aloud = splitter.finish() if piece is None else splitter.push(piece)
        text, news = parser.push(aloud)
        reasoning, content = reasoning + thought, content + text
        deltas += news
    text, news = parser.finish()
    return reasoning, Found(content + text, calls_of([*deltas, *news]), parser.num_complete)


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        (f"{ANALYSIS}Why.{END}{OPENING}{FINAL}Hi.", "Why.", Found("Hi.", [], 0)),
        (f"{FINAL}Hi.<|return|>", "", Found("Hi.", [], 0)),
        (f"{ANALYSIS}Why.{END}{OPENING}{CALL}", "Why.", Found("", [("f", '{"a": 1}')], 1)),
        (f"{ANALYSIS}A{END}{OPENING}{ANALYSIS}B{END}{OPENING}{FINAL}C", "A\n\nB", Found("C", [], 0)),
        (f"{COMMENTARY}Let me see.{END}{OPENING}{CALL}", "", Found("Let me see.", [("f", '{"a": 1}')], 1)),
        (f"{COMMENTARY}One.{END}{OPENING}{FINAL}Two.", "", Found("One.\n\nTwo.", [], 0)),
        ("<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}", "", Found("", [("g", "{}")], 1)),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "", Found("", [("browser.search", "{}")], 1)),
        ("<|channel|>analysis to=python<|message|>x = 1<|call|>", "", Found("x = 1<|call|>", [("python", "")], 0)),
        (CALL.replace("<|call|>", "<|return|>"), "", Found("", [("f", '{"a": 1}')], 1)),
        (CALL.replace('{"a": 1}', ""), "", Found("", [("f", "{}")], 1)),
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", Found("", [("f", "{}")], 1)),
        (f"<|start|>assistant to=assistant{ANALYSIS}Why.{END}{OPENING}{FINAL}Hi.", "Why.", Found("Hi.", [], 0)),
        (CALL.replace("1", '"<|end|>"'), "", Found("", [("f", '{"a": "<|end|>"}')], 1)),
        ("No header.", "", Found("No header.", [], 0)),
        (f"{ANALYSIS}Cut", "Cut", Found("", [], 0)),
        ("<|channel|>analy", "", Found("", [], 0)),
        (CALL[:-10], "", Found("", [("f", '{"a": ')], 0)),
        ("", "", Found("", [], 0)),
    ],
)
def test_messages_are_split(text: str, reasoning: str, expected: Found) -> None:
    assert split([text]) == (reasoning, expected)
    assert split(list(text)) == (reasoning, expected)
    for place in range(len(text)):
        assert split([text[:place], text[place:]]) == (reasoning, expected)


def test_a_prompt_may_end_inside_reasoning() -> None:
    text = f"Why.{END}{OPENING}{FINAL}Hi."
    assert HarmonySplitter(True).in_reasoning and not HarmonySplitter(False).in_reasoning
    for pieces in ([text], list(text)):
        assert split(pieces, opened=True) == ("Why.", Found("Hi.", [], 0))
    splitter = HarmonySplitter(False)
    splitter.push(ANALYSIS + "x")
    assert splitter.in_reasoning
    splitter.push(END)
    assert not splitter.in_reasoning


@pytest.mark.parametrize(
    "part", ["<|channel|>", "<|start|>assistant", ANALYSIS, CALL, "<|chan", "x" + END, FINAL + " "]
)
def test_time_is_linear(part: str) -> None:
    expect_linear(lambda size: split([part] * size), 500, 5_000)


def test_the_format_is_detected() -> None:
    assert detect_reasoning(templates.GPT_OSS, {}) is REASONING_FORMATS["harmony"]
    # Templates of Phi use the same end mark.
    assert detect_reasoning("{{ '<|assistant|>' + message.content + '<|end|>' }}", {"<|end|>": 5}) is None


def test_one_grammar_of_reasoning_content_and_calls() -> None:
    tools = [Tool(name="f", parameters={"properties": {"a": {"type": "integer"}}})]
    reasoning = reasoning_fragment(REASONING_FORMATS["harmony"], False, SPECIAL_IDS)
    calls = HARMONY.call_grammar(tools, SPECIAL_IDS, parallel=True)
    answer = final_message(Fragment(json_expression({"enum": ["yes"]}, "response_format")), SPECIAL_IDS)
    either = any_of([answer.expression, calls.expression])
    fragment = Fragment(f"{reasoning.expression} {either}", (*reasoning.rules, *answer.rules, *calls.rules))
    for before in ("", f"{ANALYSIS}Why.{END}{OPENING}"):
        for text in (f'{FINAL}"yes"', CALL, CALL.removesuffix("<|call|>")):
            assert accepts(fragment, before + text), before + text
        assert not holds(fragment, f"{before}{FINAL}no") and not holds(fragment, before + CALL.replace("1", '"1"'))
