"""A choice whose text is taken apart: reasoning, stop strings, content and tool calls, in any grouping of tokens.

Numbers in docstrings are cases of the collected bug reports.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.flow.choice import Choice, scanners_of
from gateway.flow.events import TextDelta
from gateway.flow.outbox import merged
from gateway.text.detokenizer import Detokenizer, build_token_bytes
from gateway.text.formats import TOOL_FORMATS, model_formats
from gateway.text.message_parser import ToolCallDelta
from gateway.text.reasoning import REASONING_FORMATS
from gateway.text.tools.format import Tool, ToolRequest
from gateway.text.tools.prompting import TemplateSupport
from shared.messages import Finish, FinishReason, Output
from shared.sampling_params import SamplingParams
from tests.fakes.gateway_core import make_request
from tests.fakes.hermes import END, call_text, tokenizer

TABLE = build_token_bytes(json.loads(tokenizer().to_str()), tokenizer().get_vocab())
STOP = Finish(FinishReason.STOP, stop_token_id=END)
LENGTH = Finish(FinishReason.LENGTH)
TOOL = Tool(name="get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
ARGUMENTS = {"city": 'Z\u00fcrich "}]"', "days": [1, {"a": None}]}
CALL = call_text("get_weather", ARGUMENTS)
THOUGHT = "<think>\nA song? Look.\n</think>\n\n"


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def make(*stop: str, opened: bool = False, choice: str = "auto", special: bool = False, **changes: Any):
    added = {mark: tokenizer().token_to_id(mark) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")}
    hidden = frozenset(token_id for token_id in added.values() if token_id is not None and special)
    formats = model_formats(REASONING_FORMATS["think"], TOOL_FORMATS["hermes"], added, hidden, TemplateSupport())
    tools = ToolRequest(tools=(TOOL,), callable=(TOOL,), choice=choice)  # type: ignore[arg-type]
    form = formats.message_format(tools, opened=opened)
    assert form is not None
    request = make_request([1], stop=stop, **{"max_tokens": 4000, "format": form, **changes})
    new_scanner = scanners_of(request)
    table = build_token_bytes(json.loads(tokenizer().to_str()), tokenizer().get_vocab())
    table.special_ids |= hidden
    detokenizer = Detokenizer(table, skip_special_tokens=True, shown_ids=form.shown_ids)
    return Choice(0, request, new_scanner and new_scanner(), detokenizer)


def feed(choice: Choice, token_ids: list[int], finish: Finish | None = None, **fields: Any) -> TextDelta:
    return choice.advance(Output("r", 0, token_ids, finish, **fields), 512)


def say(choice: Choice, text: str, finish: Finish = STOP, size: int = 1) -> TextDelta:
    """Return all deltas of a text that arrives in groups of this many tokens."""
    ids = ids_of(text) + ([END] if finish is STOP else [])
    deltas: list[TextDelta] = []
    for start in range(0, len(ids), size):
        if not choice.finished:
            last = start + size >= len(ids)
            deltas.append(feed(choice, ids[start : start + size], finish if last else None))
    return merged(deltas)


def calls_of(delta: TextDelta) -> list[tuple[str, Any]]:
    calls: list[list[Any]] = []
    for news in delta.tool_calls:
        if news.name is not None:
            assert news.id and news.index == len(calls)
            calls.append([news.name, ""])
        calls[news.index][1] += news.arguments
    return [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("special", [True, False])
def test_reasoning_content_and_calls(size: int, special: bool) -> None:
    """30: whatever comes in a step. Marks are seen also where they are special tokens, which others do not see."""
    delta = say(make(special=special), THOUGHT + "Let me look.\n" + CALL + "\n" + CALL, size=size)
    assert delta.reasoning == "A song? Look."
    assert delta.text.strip() == "Let me look."
    assert [(name, json.loads(text)) for name, text in calls_of(delta)] == [("get_weather", ARGUMENTS)] * 2
    assert delta.finish_reason == "tool_calls"
    assert delta.num_reasoning_tokens == len(ids_of(THOUGHT.rstrip()))


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_call_that_the_limit_cuts_off_ends_with_length(choice: str) -> None:
    """34."""
    delta = say(make(choice=choice), CALL[:50], LENGTH)
    ((name, arguments),) = calls_of(delta)
    assert delta.finish_reason == "length" and name == "get_weather"
    assert arguments and json.dumps(ARGUMENTS).startswith(arguments)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_the_beginning_of_an_enforced_call_is_no_content(choice: str) -> None:
    """Content must not contain the syntax of a call that the limit cut off."""
    for text in ("<tool", '<tool_call>\n{"na', CALL + "\n<tool_call>"):
        delta = say(make(choice=choice), text, LENGTH)
        assert (delta.text, delta.finish_reason) == ("", "length")
    assert say(make(), "<tool", LENGTH).text == "<tool"
    assert say(make(), "Just words <tool and {braces}.").text == "Just words <tool and {braces}."


def test_a_named_function_ends_with_stop() -> None:
    assert say(make(choice="named"), CALL).finish_reason == "stop"
    assert say(make(choice="required"), CALL).finish_reason == "tool_calls"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_stop_strings_hold_for_what_is_said_aloud(size: int) -> None:
    """11: not in reasoning; what matched is never shown."""
    delta = say(make("song"), THOUGHT + "I know a song about it.", size=size)
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("A song? Look.", "I know a ", "stop")
    delta = say(make("song"), "<think>\nOnly a song", LENGTH, size)
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("Only a song", "", "length")
    delta = say(make("song", include_stop_str_in_output=True), THOUGHT + "A song about it.", size=size)
    assert delta.text == "A song"


def test_a_call_that_a_stop_string_cuts_off_is_none_to_act_upon() -> None:
    delta = say(make("days"), CALL)
    assert delta.finish_reason == "stop"
    delta = say(make("Bye"), CALL + "\nBye now")
    assert delta.finish_reason == "tool_calls" and len(calls_of(delta)) == 1


def test_a_mark_that_ends_the_choice_is_read() -> None:
    """gpt-oss ends with the mark after a call; a hidden token that is not a mark has no text."""
    closing = tokenizer().token_to_id("</tool_call>")
    choice = make(special=True)
    delta = feed(choice, ids_of(CALL), Finish(FinishReason.STOP, stop_token_id=closing))
    assert (delta.text, delta.finish_reason) == ("", "tool_calls") and len(calls_of(delta)) == 1


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    sampling = SamplingParams(max_tokens=400, min_tokens=len(ids_of(THOUGHT + "a song")))
    delta = say(make("song", sampling=sampling), THOUGHT + "a song and a song")
    assert delta.text == "a song and a "


def test_reasoning_that_never_ends_is_all_there_is() -> None:
    delta = say(make(), "<think>\nHm. \n")
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("Hm.", "", "stop")
    assert delta.num_reasoning_tokens == len(ids_of("<think>\nHm. \n"))
    delta = say(make(opened=True), "Hm", LENGTH)
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("Hm", "", "length")


def test_news_of_calls_are_merged() -> None:
    news = [
        ToolCallDelta(0, id="a", name="f"),
        ToolCallDelta(0, "{"),
        ToolCallDelta(0, "}"),
        ToolCallDelta(1, "{", id="b", name="g"),
        ToolCallDelta(1, "1}"),
        ToolCallDelta(2, "", id="c", name="h"),
    ]
    deltas = [TextDelta(0, "", [7], reasoning="r", tool_calls=[one], num_reasoning_tokens=1) for one in news]
    one = merged(deltas)
    assert one.tool_calls == [
        ToolCallDelta(0, "{}", id="a", name="f"),
        ToolCallDelta(1, "{1}", id="b", name="g"),
        ToolCallDelta(2, "", id="c", name="h"),
    ]
    assert (one.reasoning, one.num_reasoning_tokens, one.token_ids) == ("rrrrrr", 6, [7] * 6)
    assert merged(deltas[1:3]).tool_calls == [ToolCallDelta(0, "{}")]
