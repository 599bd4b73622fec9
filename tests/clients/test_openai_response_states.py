"""/v1/responses with the official Python client: agents without a store, references, and ended responses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.text.grammars.json_schema import is_strict
from tests.clients.answers import HELLO, KEY
from tests.clients.test_openai_responses import TOOLS
from tests.clients.test_openai_tools import PARAMETERS
from tests.e2e.server import wait_until
from tests.fakes.prepared_server import MODEL

STRICT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


@pytest.mark.parametrize("stream", [False, True])
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


def test_items_are_referred_to(client):
    first = client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
    call = next(item for item in first.output if item.type == "function_call")
    listed = client.responses.input_items.list(first.id, order="asc")
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in [*listed, *first.output]]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "grey"}'}
    again = client.responses.create(model=MODEL, input=[*references, result], tools=TOOLS)
    assert again.output_text == "It is grey there."
    assert client.responses.input_tokens.count(model=MODEL, input=references, tools=TOOLS).input_tokens > 0
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "input[0].id"


def test_tools_are_strict_where_they_can_be(client):
    loose = {**TOOLS[0], "name": "loose", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    asked = [{name: value for name, value in tool.items() if name != "strict"} for tool in (*TOOLS, loose)]
    response = client.responses.create(model=MODEL, input="weather?", tools=asked)
    assert [tool.strict for tool in response.tools] == [is_strict(PARAMETERS), False]
    fits = {**asked[0], "parameters": STRICT}
    assert client.responses.create(model=MODEL, input="hello", tools=[fits]).tools[0].strict is True


def test_a_streamed_response_is_retrieved_while_it_runs_and_after_its_client_left(client):
    with client.responses.create(model=MODEL, input="endless", stream=True) as stream:
        made = next(event for event in stream if event.type == "response.created").response.id
        assert client.responses.retrieve(made).status == "in_progress"
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(made)
        next(event for event in stream if event.type == "response.output_text.delta")
    wait_until(lambda: client.responses.retrieve(made).status != "in_progress", 30, "the response is ended")
    left = client.responses.retrieve(made)
    assert left.status == "cancelled" and left.output_text and left.usage.output_tokens > 0


def test_a_background_stream_is_gone_on_with_where_it_broke(client):
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


def test_query_parameters_that_nobody_reads_are_refused(client):
    made = client.responses.create(model=MODEL, input="hello").id
    for name in ("include", "api-version"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.retrieve(made, extra_query={name: "x"})
        assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
    azure = client.with_options(default_query={"api-version": "preview"})
    with pytest.raises(openai.BadRequestError, match="api-version"):
        azure.models.list()
    assert client.responses.retrieve(made, include_obfuscation=False).output_text == HELLO
