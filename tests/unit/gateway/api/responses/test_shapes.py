"""Conversion of deltas to a response. Merged deltas give the same response."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest

from gateway.api.common.envelope import Tally
from gateway.api.common.logprobs import TokenNames
from gateway.api.responses.fields import ResponseFields
from gateway.api.responses.shapes import ResponseEvents, response_head
from gateway.flow.events import TextDelta
from gateway.flow.outbox import merged
from gateway.text.message_parser import ToolCallDelta
from shared.errors import InternalError, RateLimitError
from tests.fakes.fake_generator import logprob

DELTAS = [
    TextDelta(0, "", [1], reasoning="Hm", num_reasoning_tokens=1),
    TextDelta(0, "", [2], reasoning=".", num_reasoning_tokens=1),
    TextDelta(0, "Let ", [3]),
    TextDelta(0, "me.", [4]),
    TextDelta(0, "", [5], tool_calls=[ToolCallDelta(0, '{"a"', "call_1", "f")]),
    TextDelta(0, "", [6], tool_calls=[ToolCallDelta(0, ": 1}")]),
    TextDelta(0, "\n", [7]),
    TextDelta(0, "", [8], tool_calls=[ToolCallDelta(1, "{}", "call_2", "g")]),
    TextDelta(0, "", [], finish_reason="tool_calls"),
]


def encoder_of(*, logprobs: bool = False, **options: Any) -> ResponseEvents:
    """Return an encoder for a response to one word."""
    head = response_head(ResponseFields(model="m", input="x"), "resp_1", 0, None)
    names = TokenNames(lambda token_id: bytes([token_id])) if logprobs else None
    options = {"may_call": True, "packs_reasoning": False, "on_change": lambda _: None} | options
    return ResponseEvents(head, Tally(1), names, gateway_index=0, **options)


def parsed(raw: bytes) -> list[Any]:
    """Return the events of a stream."""
    return [orjson.loads(event.partition(b"data: ")[2]) for event in raw.split(b"\n\n")[:-1]]


def run(deltas: list[TextDelta], **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the response and its events."""
    encoder = encoder_of(**options)
    events = parsed(b"".join([*(encoder.encode(0, 0, delta) for delta in deltas), encoder.end()]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return orjson.loads(orjson.dumps(encoder.response)), events


def shape(response: dict[str, Any]) -> list[Any]:
    """Return the items without their ids."""
    return [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]


def collected(events: list[Any]) -> dict[str, str]:
    """Return the text that a client assembles from the deltas of each item."""
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    return texts


@pytest.mark.parametrize("size", range(1, len(DELTAS)))
def test_merged_deltas_give_the_same_response(size):
    pieces = [list(DELTAS[start : start + size]) for start in range(0, len(DELTAS), size)]
    response, events = run([merged(piece) for piece in pieces])
    items = shape(response)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items == shape(run(DELTAS)[0])
    assert list(collected(events).values()) == ["Hm.", "Let me.", '{"a": 1}', "{}"]
    assert {item["status"] for item in items} == {"completed"} and response["status"] == "completed"


def test_every_started_item_and_part_ends():
    _, events = run(DELTAS)
    kinds = [event["type"] for event in events]
    for name in ("output_item", "content_part"):
        assert kinds.count(f"response.{name}.added") == kinds.count(f"response.{name}.done") > 0
    open_items = list(itertools.accumulate(kind.count("item.added") - kind.count("item.done") for kind in kinds))
    assert max(open_items) == 1 and open_items[-1] == 0


def test_text_after_a_call_is_another_message():
    call = TextDelta(0, "", [1], tool_calls=[ToolCallDelta(0, "{", "call_1", "f")])
    rest = TextDelta(0, "", [2], tool_calls=[ToolCallDelta(0, "}")])
    said = TextDelta(0, "Done.", [3])
    for deltas in ([call, rest, said], [call, merged([rest, said])]):
        first, second = shape(run(deltas)[0])
        assert first["arguments"] == "{}" and second["content"][0]["text"] == "Done."
    with pytest.raises(InternalError):
        run([call, said, rest])


def test_white_space_of_text_is_kept():
    for may_call in (False, True):
        response, _ = run([TextDelta(0, "\n ", [1]), TextDelta(0, "x", [2])], may_call=may_call)
        assert response["output"][0]["content"][0]["text"] == "\n x"
        response, _ = run([TextDelta(0, "x \n", [1]), TextDelta(0, "\n", [2])], may_call=may_call)
        assert response["output"][0]["content"][0]["text"] == "x \n\n"
        (empty,) = run([TextDelta(0, " ", [1])], may_call=may_call)[0]["output"]
        assert empty["content"][0]["text"] == " "
    assert run([])[0]["output"][0]["content"][0]["text"] == ""


def test_only_messages_have_log_probabilities():
    deltas = [
        TextDelta(0, "", [1], [logprob(65)], reasoning="A", num_reasoning_tokens=1),
        TextDelta(0, "B", [2], [logprob(66)]),
        TextDelta(0, "", [3], [logprob(67)]),
        TextDelta(0, "CD", [4], [logprob(68)]),
        TextDelta(0, "", [5], [logprob(69)], tool_calls=[ToolCallDelta(0, "{}", "call_1", "f")]),
    ]
    response, events = run(deltas, logprobs=True)
    part = response["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "BCD"
    told = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert told == part["logprobs"]


def test_failure_keeps_the_output():
    states: list[str] = []
    encoder = encoder_of(may_call=False, on_change=lambda response: states.append(response["status"]))
    encoder.encode(0, 0, TextDelta(0, "Hel", [1]))
    response = parsed(encoder.failed(RateLimitError("Too many.", retry_after=1.0)))[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "rate_limit_exceeded"
    assert response["output"][0]["status"] == "incomplete" and response["output"][0]["content"][0]["text"] == "Hel"
    assert states == ["in_progress", "failed"]
