"""Answers and events of /v1/responses against their schemas and the types of OpenAI's package."""

from __future__ import annotations

import typing

import msgspec
import openai.types.responses as theirs
import orjson
import pydantic
import pytest
from openai.types.responses.response_item_list import ResponseItemList

from gateway.api.responses.answers import InputItemsAnswer, ResponseAnswer, ResponseEvent
from gateway.api.responses.items import input_items
from gateway.api.responses.shapes import stored_items, stream_failure
from gateway.flow.events import TextDelta
from gateway.flow.outbox import merged
from shared.errors import RateLimitError, WorkerLostError
from tests.fakes.fake_generator import logprob
from tests.unit.gateway.api.responses.test_shapes import DELTAS, encoder_of, parsed

THEIR_EVENTS: dict[str, type[pydantic.BaseModel]] = {
    typing.get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in typing.get_args(typing.get_args(theirs.ResponseStreamEvent)[0])
}
CUT = [TextDelta(0, "Hel", [1]), TextDelta(0, "", [], finish_reason="length")]
SCORED = [TextDelta(0, "a", [97], logprobs=[logprob(97, 2)]), TextDelta(0, "", [], finish_reason="stop")]


@pytest.mark.parametrize(
    "deltas", [DELTAS, [merged(DELTAS[:4])], CUT, SCORED, []], ids=["each", "merged", "cut", "scored", "nothing"]
)
@pytest.mark.parametrize("end", ["end", "cancel", "fail", "limit"])
def test_events_match_their_schemas_and_openais_types(deltas, end):
    encoder = encoder_of(logprobs=deltas is SCORED, packs_reasoning=True)
    raw = b"".join(encoder.encode(0, 0, delta) for delta in deltas[:-1] if deltas)
    raw += {
        "end": encoder.end,
        "cancel": encoder.cancel,
        "fail": lambda: encoder.failed(WorkerLostError("The worker died.")),
        "limit": lambda: encoder.failed(RateLimitError("Too many.", retry_after=1.0)),
    }[end]()
    events = parsed(raw)
    assert events[-1]["response"]["status"] != "in_progress"
    for event in events:
        msgspec.convert(event, ResponseEvent, strict=True)
        THEIR_EVENTS[event["type"]].model_validate(event)
    answer = orjson.loads(orjson.dumps(encoder.response))
    msgspec.convert(answer, ResponseAnswer, strict=True)
    theirs.Response.model_validate(answer)


def test_stream_failure_matches_its_schema():
    (event,) = parsed(stream_failure(WorkerLostError("Gone."), 7))
    assert event["sequence_number"] == 7
    msgspec.convert(event, ResponseEvent, strict=True)
    THEIR_EVENTS[event["type"]].model_validate(event)


def test_listed_input_items_match_their_schema():
    items = input_items(
        [
            {"role": "user", "content": "x"},
            {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "x", "logprobs": [], "annotations": []}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        0,
    )
    data = orjson.loads(stored_items(items))
    page = {"object": "list", "data": data, "first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    msgspec.convert(page, InputItemsAnswer, strict=True)
    ResponseItemList.model_validate(page)


@pytest.mark.parametrize("change", [{"more": 1}, {"status": "gone"}, {"output": [{"type": "x"}]}, {"usage": {}}])
def test_schemas_refuse_undeclared_values(change):
    answer = orjson.loads(orjson.dumps(encoder_of().response))
    msgspec.convert(answer, ResponseAnswer, strict=True)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**answer, **change}, ResponseAnswer, strict=True)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({name: value for name, value in answer.items() if name != "user"}, ResponseAnswer, strict=True)
