"""/v1/responses with the official Python client: stored, streamed, in the background, and without a store."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from tests.clients.answers import HELLO, PARAMETERS, PERSON, WEATHER, Person
from tests.fakes.prepared_server import MODEL

TOOLS: list = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
STREAM = pytest.mark.parametrize("stream", [False, True])


def test_create(client):
    response = client.responses.create(model=MODEL, input="hello", instructions="Be kind.", metadata={"a": "b"})
    assert response.output_text == HELLO and response.status == "completed" and response.error is None
    assert response.usage.output_tokens > 3 and response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.metadata == {"a": "b"} and response.instructions == "Be kind." and response.model == MODEL


def test_stream(client):
    with client.responses.stream(model=MODEL, input=[{"role": "user", "content": "hello"}]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert final.output_text == HELLO
    assert final.id == events[0].response.id == client.responses.retrieve(final.id).id


def test_parse(client):
    response = client.responses.parse(model=MODEL, input="person?", text_format=Person)
    assert response.output_parsed == Person(**PERSON)
    cut = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


@STREAM
def test_a_tool_loop_by_previous_response_id(client, stream):
    if stream:
        with client.responses.stream(model=MODEL, input="weather?", tools=TOOLS) as events:
            told = [event for event in events if event.type == "response.function_call_arguments.delta"]
            response = events.get_final_response()
        assert json.loads("".join(event.delta for event in told)) == WEATHER
    else:
        response = client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
    message, call = response.output
    assert message.content[0].text.strip() == "Let me look."
    assert call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == WEATHER
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"sky": "grey"})}
    answer = client.responses.create(model=MODEL, input=[result], tools=TOOLS, previous_response_id=response.id)
    assert answer.output_text == "It is grey there." and answer.previous_response_id == response.id
    items = list(client.responses.input_items.list(answer.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    # Without a store, the output items are sent as input again.
    history = [{"role": "user", "content": "weather?"}, *(item.to_dict() for item in response.output), result]
    assert (
        client.responses.create(model=MODEL, input=history, tools=TOOLS, store=False).output_text == answer.output_text
    )


@STREAM
def test_reasoning(client, stream):
    if stream:
        with client.responses.stream(model=MODEL, input="think") as events:
            deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            response = events.get_final_response()
        assert "".join(deltas) == "Two and two."
    else:
        response = client.responses.create(model=MODEL, input="think")
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == "Two and two." and reasoning.summary == []
    assert message.content[0].text == "Four." and response.usage.output_tokens_details.reasoning_tokens > 0
    items = [{"role": "user", "content": "x"}, *(item.to_dict() for item in response.output)]
    again = client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": "hello"}])
    assert again.output_text == HELLO


def test_the_life_of_a_stored_response(client):
    response = client.responses.create(model=MODEL, input="hello")
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    client.responses.delete(response.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            act(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="hello", previous_response_id=response.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    unstored = client.responses.create(model=MODEL, input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_background(client):
    response = client.responses.create(model=MODEL, input="hello", background=True)
    assert response.status == "queued"
    with client.responses.stream(response_id=response.id, starting_after=1) as stream:
        assert stream.get_final_response().output_text == HELLO
    assert client.responses.retrieve(response.id).status == "completed"
    endless = client.responses.create(model=MODEL, input="endless", background=True)
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert client.responses.retrieve(endless.id).status == "cancelled"


@STREAM
def test_an_agent_without_a_store(client, stream):
    """Store nothing and send back all output items, encrypted reasoning and call results, as Codex does."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be kind.",
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "stream": stream,
    }
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "think and call"}]}]
    for _ in range(2):
        answer = client.responses.create(input=history, **asked)
        if stream:
            output = [event.item for event in answer if event.type == "response.output_item.done"]
        else:
            output = answer.output
        assert output[0].type == "reasoning" and output[0].encrypted_content
        for item in output:
            kept = item.to_dict()
            if item.type == "reasoning":
                del kept["content"], kept["id"], kept["status"]
            history.append(kept)
            if item.type == "function_call":
                history.append({"type": "function_call_output", "call_id": item.call_id, "output": "sunny"})
    assert output[-1].content[0].text == "Done."


def test_a_background_stream_is_resumed_after_any_event(client):
    """The client continues from any event, also while the response waits."""
    kinds = ["created", "queued", "in_progress"]
    for seen in range(1, 5):
        events: list[Any] = []
        with client.responses.create(model=MODEL, input="hello", stream=True, background=True) as stream:
            while len(events) < seen:
                events.append(next(iter(stream)))
        made, cursor = events[0].response.id, events[-1].sequence_number
        events += client.responses.retrieve(made, stream=True, starting_after=cursor)
        assert [event.type.removeprefix("response.") for event in events[:3]] == kinds
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed" and events[-1].response.output_text == HELLO


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("helper", [False, True])
def test_readers_see_that_a_response_was_cancelled(client, deletes, helper):
    made = client.responses.create(model=MODEL, input="endless", background=True).id
    end = client.responses.delete if deletes else client.responses.cancel
    kinds: list[str] = []
    ending = threading.Thread(target=end, args=(made,))

    def read(stream: Any) -> Any:
        """Return the last event."""
        for event in stream:
            if event.type == "response.output_text.delta" and event.type not in kinds:
                ending.start()
            kinds.append(event.type)
        return event

    if helper:
        with client.responses.stream(response_id=made) as stream:
            last = read(stream)
            with pytest.raises(RuntimeError, match="completed"):
                stream.get_final_response()
    else:
        last = read(client.responses.retrieve(made, stream=True))
    ending.join()
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
