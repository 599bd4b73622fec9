"""/v1/responses with the official Python client, against prepared answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.clients.answers import HELLO, KEY, PERSON, WEATHER
from tests.clients.test_openai_tools import PARAMETERS, Person
from tests.fakes.prepared_server import MODEL

TOOLS: list = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather.",
        "parameters": PARAMETERS,
        "strict": False,
    }
]


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


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


@pytest.mark.parametrize("stream", [False, True])
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


def test_two_calls_and_no_messages_between(client):
    response = client.responses.create(model=MODEL, input="two cities?", tools=TOOLS)
    assert [item.type for item in response.output] == ["function_call", "function_call"]
    assert [json.loads(item.arguments)["city"] for item in response.output] == ["Bern", "Rome"]


@pytest.mark.parametrize("stream", [False, True])
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


def test_logprobs(client):
    include = ["message.output_text.logprobs"]
    whole = client.responses.create(model=MODEL, input="hello", include=include, top_logprobs=2)
    entries = whole.output[0].content[0].logprobs
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == HELLO
    with client.responses.stream(model=MODEL, input="hello", include=include) as stream:
        told = [entry for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert "".join(entry.token for entry in told)[:5] == "Hello"


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


def test_a_failure_in_a_stream(client):
    stream = client.responses.create(model=MODEL, input="break", stream=True)
    *_, last = list(stream)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error"


def test_input_tokens(client):
    count = client.responses.input_tokens.count(model=MODEL, input="hello", tools=TOOLS)
    whole = client.responses.create(model=MODEL, input="hello", tools=TOOLS)
    assert count.input_tokens == whole.usage.input_tokens


async def test_async(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        first = await client.responses.create(model=MODEL, input="hello")
        stream = await client.responses.create(model=MODEL, input="think", previous_response_id=first.id, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "Four."
        found = await client.responses.retrieve(events[-1].response.id)
        assert found.previous_response_id == first.id
        await client.responses.delete(first.id)
