"""Messages of a chat request: accepted forms, and the field that each refusal names."""

from __future__ import annotations

import typing

import pytest
from openai.types.chat import ChatCompletionContentPartTextParam

from gateway.api.common.messages import check_messages
from shared.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("sent", "kept"), [('{"a": 1}', '{"a": 1}'), ("", "{}"), ('{"city": "Par', '{"city": "Par'), ("[1]", "[1]")]
)
def test_arguments_of_an_earlier_call_are_not_changed(sent: str, kept: str) -> None:
    """Clients send back a call that max_tokens cut off, and OpenAI accepts it."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": sent}}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "cut off"},
    ]
    assert check_messages(history)[1]["tool_calls"][0]["function"]["arguments"] == kept
    # Only their nesting is bounded.
    call["function"] = {"name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}
    with pytest.raises(InvalidRequestError) as refusal:
        check_messages(history)
    assert refusal.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_cache_breakpoint_has_no_effect(role: str) -> None:
    for mark in (None, {"mode": "explicit"}, {"mode": "explicit", "ttl": "12h"}):
        part = {"type": "text", "text": "x", "prompt_cache_breakpoint": mark}
        assert check_messages([{"role": role, "content": [part]}])[0]["content"] == "x"
    known = set(typing.get_type_hints(ChatCompletionContentPartTextParam))
    assert known == {"type", "text", "prompt_cache_breakpoint"}


@pytest.mark.parametrize(
    ("mark", "where"),
    [("x", ""), ({}, ".mode"), ({"mode": "implicit"}, ".mode"), ({"mode": "explicit", "ttl": "1h"}, ".ttl"),
     ({"mode": "explicit", "x": 1}, ".x")],
)  # fmt: skip
def test_a_malformed_cache_breakpoint_is_refused(mark: object, where: str) -> None:
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": mark}
    with pytest.raises(InvalidRequestError) as refusal:
        check_messages([{"role": "user", "content": [part]}])
    assert refusal.value.param == f"messages[0].content[0].prompt_cache_breakpoint{where}"
    refused = {"type": "refusal", "refusal": "x", "prompt_cache_breakpoint": None}
    with pytest.raises(InvalidRequestError) as refusal:
        check_messages([{"role": "assistant", "content": [refused]}])
    assert refusal.value.code == "unknown_parameter"


def test_messages_parsed_by_openais_library_are_accepted() -> None:
    """OpenAI's `parse()` adds parsed copies to a message, and programs send such a message back."""
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    answer = {
        "role": "assistant",
        "content": '{"x": 2}',
        "parsed": {"x": 2},
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    history = [{"role": "user", "content": "?"}, answer, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    taken = check_messages(history)[1]
    assert "parsed" not in taken
    assert taken["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    with pytest.raises(InvalidRequestError):
        check_messages([{"role": "user", "content": "?", "parsed": 1}])
