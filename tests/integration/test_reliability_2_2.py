"""Reports on tool calls by number (docs/reliability.md), with a worker faster than its clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.answers import ANSWERS
from tests.fakes.prepared_server import PreparedServer

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
NUM_STREAMS = 12

Message = tuple[str, str, list[tuple[str, str]]]


def of_whole(body: dict[str, Any]) -> Message:
    """Return the content, the reasoning, and the name and arguments of each call."""
    message = body["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"] or "", message.get("reasoning_content", ""), calls


def of_stream(events: list[Any]) -> Message:
    """Assemble the same from a stream by OpenAI's rules for deltas."""
    content, reasoning = "", ""
    names: list[str] = []
    arguments: list[str] = []
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(names):
                assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                names.append(call["function"]["name"])
                arguments.append("")
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            arguments[call["index"]] += call["function"]["arguments"]
    return content, reasoning, list(zip(names, arguments, strict=True))


@pytest.fixture(scope="module")
def server() -> Iterator[PreparedServer]:
    with PreparedServer(ANSWERS, delay=0.0) as running:
        yield running


@pytest.mark.parametrize("question", ["weather?", "two cities?", "think and call", "only a call", "hello", "think"])
def test_streams_whose_pieces_are_merged_are_the_whole(server, question):
    """reliability 2.2 #26, 2.2 #27, 2.2 #28, 2.2 #29, 2.2 #33, 2.2 #36: with a fast worker, a chunk has several
    tokens.
    """
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "tools": TOOLS}
    status, body = server.post(CHAT, **fields)
    assert status == 200
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = list(pool.map(lambda _: server.stream(CHAT, **fields), range(NUM_STREAMS)))
    expected = of_whole(body)
    assert [of_stream(events) for events in streams] == [expected] * NUM_STREAMS
    assert {events[-2]["choices"][0]["finish_reason"] for events in streams} == {body["choices"][0]["finish_reason"]}
    assert (expected[2] != []) == (question not in ("hello", "think"))
