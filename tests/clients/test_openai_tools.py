"""Tools, structured output and reasoning with the official Python client, against prepared answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.clients.answers import PARAMETERS, PERSON, WEATHER, Person
from tests.fakes.http_gateway import assembled
from tests.fakes.prepared_server import MODEL

TOOLS: list = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}}
]
STREAM = pytest.mark.parametrize("stream", [False, True])


def ask(question: str) -> list:
    return [{"role": "user", "content": question}]


def answer(client: openai.OpenAI, messages: list, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message and the finish reason of the only choice; a stream is assembled."""
    result = client.chat.completions.create(model=MODEL, messages=messages, **{"tools": TOOLS, **fields})
    if fields.get("stream"):
        (choice,) = assembled(chunk.model_dump(exclude_unset=True) for chunk in result)
    else:
        (choice,) = result.model_dump(exclude_unset=True)["choices"]
    return choice["message"], choice["finish_reason"]


def arguments(message: dict[str, Any]) -> list[Any]:
    return [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]


@STREAM
def test_a_tool_loop(client, stream):
    messages = ask("weather?")
    message, finish = answer(client, messages, stream=stream)
    assert message["content"].strip() == "Let me look." and finish == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather" and arguments(message) == [WEATHER]
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear"}'}]
    final, finish = answer(client, messages, stream=stream)
    assert final["content"] == "It is clear there." and finish == "stop" and "tool_calls" not in final


@STREAM
def test_parallel_calls(client, stream):
    message, finish = answer(client, ask("two cities?"), stream=stream)
    assert arguments(message) == [{"city": "Bern"}, {"city": "Rome"}] and finish == "tool_calls"
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_results_are_returned_in_order(client):
    (choice,) = client.chat.completions.create(model=MODEL, messages=ask("two cities?"), tools=TOOLS).choices
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(choice.message.tool_calls, ("12 in Bern", "20 in Rome"), strict=True)
    ]
    # The SDK's own object is sent back with its null fields, as its documentation shows.
    message, _ = answer(client, [*ask("two cities?"), choice.message, *results])
    assert message["content"] == "12 in Bern and 20 in Rome"


@STREAM
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_forced_calls(client, server, choice, reason, stream):
    """The finish reason of a named function is `stop`, as OpenAI documents it."""
    message, finish = answer(client, ask("only a call"), tool_choice=choice, stream=stream)
    assert arguments(message) == [{"city": "Bern"}] and not message["content"] and finish == reason
    assert "get_weather" in server.worker.submits()[-1].grammar


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tool_choice": "auto"}, {"stream": True}])
def test_no_calls(client, fields):
    message, finish = answer(client, ask("hello"), **fields)
    assert message["content"].startswith("Hello") and finish == "stop" and "tool_calls" not in message


def test_parsed_calls(client):
    asked: dict[str, Any] = {"model": MODEL, "messages": ask("call a person")}
    asked["tools"] = [openai.pydantic_function_tool(Person)]
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    for final in (streamed, client.chat.completions.parse(**asked)):
        assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Person(**PERSON)


def test_parsed_output(client, server):
    asked: dict[str, Any] = {"model": MODEL, "messages": ask("person?"), "response_format": Person}
    assert client.chat.completions.parse(**asked).choices[0].message.parsed == Person(**PERSON)
    assert "languages" in server.worker.submits()[-1].grammar
    with client.chat.completions.stream(**asked) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert parsed[-1] == PERSON and final.choices[0].message.parsed == Person(**PERSON)


def test_a_truncated_answer_is_not_parsed(client):
    """Report 42: the SDK raises only if the finish reason says so."""
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ask("person?"), response_format=Person, max_tokens=5)


@pytest.mark.parametrize(
    ("kind", "value", "sign"),
    [
        ("choice", ["hello", "Hello"], "hello"),
        ("regex", "[A-Z][a-z]+ .*", "A-Z"),
        ("json", Person.model_json_schema(), "languages"),
        ("grammar", 'start: "Hello" /(.|\\n)*/', "Hello"),
    ],
)
def test_vllms_structured_outputs(client, server, kind, value, sign):
    extra = {"structured_outputs": {kind: value}}
    client.chat.completions.create(model=MODEL, messages=ask("hello"), extra_body=extra)
    client.completions.create(model=MODEL, prompt="hello", extra_body=extra)
    assert all(sign in submit.grammar for submit in server.worker.submits()[-2:])


@STREAM
def test_reasoning(client, stream):
    message, finish = answer(client, ask("think"), stream=stream)
    assert (message["content"].strip(), finish) == ("Four.", "stop")
    # vLLM's programs read `reasoning`, DeepSeek's `reasoning_content`.
    assert message["reasoning"] == message["reasoning_content"] == "Two and two."


@STREAM
def test_reasoning_before_a_call(client, stream):
    message, finish = answer(client, ask("think and call"), stream=stream, reasoning_effort="low")
    assert message["reasoning_content"].strip() == "I should look." and not (message["content"] or "").strip()
    assert arguments(message) == [{"city": "Bern"}] and finish == "tool_calls"


def test_a_message_with_reasoning_and_calls_is_sent_back(client):
    (choice,) = client.chat.completions.create(model=MODEL, messages=ask("think and call"), tools=TOOLS).choices
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "fine"}
    final, _ = answer(client, [*ask("think and call"), choice.message, result])
    assert (final["content"].strip(), final["reasoning_content"].strip()) == ("Done.", "It came back.")
