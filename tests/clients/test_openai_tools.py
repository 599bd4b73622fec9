"""Tools, structured output and reasoning with the official Python client, against prepared answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.clients.answers import KEY, PERSON, WEATHER
from tests.clients.test_openai_python import ask
from tests.fakes.prepared_server import MODEL


class Person(BaseModel):
    name: str
    age: int
    languages: list[str]


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "detail": {"type": "object"}},
    "required": ["city"],
}
TOOLS: list = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}}
]


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


def message_of_stream(chunks: openai.Stream) -> tuple[dict, str | None]:
    """Assemble a stream by OpenAI's rules: fields of a tool call are only appended, by its index."""
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            raw = call.model_dump(exclude_unset=True)
            if call.index not in calls:
                assert raw["type"] == "function" and raw["function"]["arguments"] == "" and raw["id"], raw
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            else:
                # Reports 14 and 27: unchanged fields are omitted, not null.
                assert set(raw) == {"index", "function"} and set(raw["function"]) == {"arguments"}, raw
                calls[call.index]["arguments"] += call.function.arguments
        finish = choice.finish_reason or finish
    assert list(calls) == list(range(len(calls)))
    return {"content": content, "reasoning": reasoning, "calls": list(calls.values())}, finish


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(client, stream):
    messages = ask("weather?")
    if stream:
        chunks = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, stream=True)
        message, finish = message_of_stream(chunks)
        (call,) = message["calls"]
        said = message["content"]
    else:
        (choice,) = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices
        (one,) = choice.message.tool_calls
        call = {"id": one.id, "name": one.function.name, "arguments": one.function.arguments}
        said, finish = choice.message.content, choice.finish_reason
    assert said.strip() == "Let me look." and finish == "tool_calls"
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == WEATHER
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls = [{"id": call["id"], "type": "function", "function": function}]
    messages.append({"role": "assistant", "content": said, "tool_calls": calls})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear"}'})
    (final,) = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices
    assert final.message.content == "It is clear there." and final.finish_reason == "stop"
    assert final.message.tool_calls is None


def test_parallel_calls(client, server):
    (choice,) = client.chat.completions.create(model=MODEL, messages=ask("two cities?"), tools=TOOLS).choices
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Bern"}, {"city": "Rome"}]
    assert len({call.id for call in calls}) == 2 and choice.finish_reason == "tool_calls"
    streamed, finish = message_of_stream(
        client.chat.completions.create(model=MODEL, messages=ask("two cities?"), tools=TOOLS, stream=True)
    )
    assert [call["arguments"] for call in streamed["calls"]] == [call.function.arguments for call in calls]
    assert finish == "tool_calls"
    client.chat.completions.create(
        model=MODEL, messages=ask("only a call"), tools=TOOLS, parallel_tool_calls=False, tool_choice="required"
    )
    assert server.worker.submits()[-1].grammar


def test_results_go_back_in_their_order(client):
    (choice,) = client.chat.completions.create(model=MODEL, messages=ask("two cities?"), tools=TOOLS).choices
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(choice.message.tool_calls, ("12 in Bern", "20 in Rome"), strict=True)
    ]
    # The SDK's own object is sent back with its null fields, as its documentation shows.
    messages = [*ask("two cities?"), choice.message, *results]
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert final.choices[0].message.content == "12 in Bern and 20 in Rome"


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_forced_calls(client, server, choice, finish):
    """The finish reason of a named function is `stop`, as OpenAI documents it."""
    for stream in (False, True):
        answer = client.chat.completions.create(
            model=MODEL, messages=ask("only a call"), tools=TOOLS, tool_choice=choice, stream=stream
        )
        if stream:
            message, reason = message_of_stream(answer)
            assert json.loads(message["calls"][0]["arguments"]) == {"city": "Bern"} and not message["content"]
        else:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"} and not message.content
        assert reason == finish
        assert "get_weather" in server.worker.submits()[-1].grammar


def test_no_calls(client, server):
    for choice in ("none", "auto"):
        (answer,) = client.chat.completions.create(
            model=MODEL, messages=ask("hello"), tools=TOOLS, tool_choice=choice
        ).choices
        assert answer.finish_reason == "stop" and answer.message.tool_calls is None
    streamed, finish = message_of_stream(
        client.chat.completions.create(model=MODEL, messages=ask("hello"), tools=TOOLS, stream=True)
    )
    assert streamed["content"] == answer.message.content and finish == "stop" and not streamed["calls"]


def test_the_stream_helper_parses_calls(client):
    with client.chat.completions.stream(
        model=MODEL, messages=ask("call a person"), tools=[openai.pydantic_function_tool(Person)]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Person(**PERSON)


def test_parsed_output(client, server):
    answer = client.chat.completions.parse(model=MODEL, messages=ask("person?"), response_format=Person)
    assert answer.choices[0].message.parsed == Person(**PERSON)
    assert "languages" in server.worker.submits()[-1].grammar
    calls = client.chat.completions.parse(
        model=MODEL, messages=ask("call a person"), tools=[openai.pydantic_function_tool(Person)]
    )
    assert calls.choices[0].message.tool_calls[0].function.parsed_arguments == Person(**PERSON)
    with client.chat.completions.stream(model=MODEL, messages=ask("person?"), response_format=Person) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert parsed[-1] == PERSON and final.choices[0].message.parsed == Person(**PERSON)


async def test_parsed_output_async(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=ask("person?"), response_format=Person)
        assert answer.choices[0].message.parsed == Person(**PERSON)
        async with client.chat.completions.stream(
            model=MODEL, messages=ask("person?"), response_format=Person
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Person(**PERSON)


def test_a_truncated_answer_is_not_parsed(client):
    """Report 42: the SDK raises only if the finish reason says so."""
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ask("person?"), response_format=Person, max_tokens=5)


def test_vllms_structured_outputs(client, server):
    for kind, value, sign in (
        ("choice", ["hello", "Hello"], "hello"),
        ("regex", "[A-Z][a-z]+ .*", "A-Z"),
        ("json", Person.model_json_schema(), "languages"),
        ("grammar", 'start: "Hello" /(.|\\n)*/', "Hello"),
    ):
        client.chat.completions.create(
            model=MODEL, messages=ask("hello"), extra_body={"structured_outputs": {kind: value}}
        )
        assert sign in server.worker.submits()[-1].grammar
        client.completions.create(model=MODEL, prompt="hello", extra_body={"structured_outputs": {kind: value}})
        assert sign in server.worker.submits()[-1].grammar


BAD_SCHEMA = {"type": "stsring"}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": BAD_SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": BAD_FORMAT}, "response_format"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"structured_outputs": {"regex": "(unclosed"}}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_followed_is_a_bad_request(client, server, fields, param):
    asked = len(server.worker.submits())
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=ask("hello"), **fields)
    assert error.value.param.startswith(param) and len(server.worker.submits()) == asked


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(client, stream):
    if stream:
        message, finish = message_of_stream(
            client.chat.completions.create(model=MODEL, messages=ask("think"), stream=True)
        )
        content, reasoning = message["content"], message["reasoning"]
    else:
        (choice,) = client.chat.completions.create(model=MODEL, messages=ask("think")).choices
        content, finish = choice.message.content, choice.finish_reason
        # vLLM's programs read `reasoning`, DeepSeek's `reasoning_content`.
        reasoning = choice.message.reasoning_content
        assert choice.message.reasoning == reasoning
    assert (content.strip(), reasoning.strip(), finish) == ("Four.", "Two and two.", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_before_a_call(client, stream):
    answer = client.chat.completions.create(
        model=MODEL, messages=ask("think and call"), tools=TOOLS, stream=stream, reasoning_effort="low"
    )
    if stream:
        message, finish = message_of_stream(answer)
        (call,) = message["calls"]
        reasoning, content, arguments = message["reasoning"], message["content"], call["arguments"]
    else:
        (choice,) = answer.choices
        (one,) = choice.message.tool_calls
        reasoning, content, arguments = choice.message.reasoning_content, choice.message.content, one.function.arguments
        finish = choice.finish_reason
        details = answer.usage.completion_tokens_details
        assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    assert reasoning.strip() == "I should look." and not (content or "").strip()
    assert json.loads(arguments) == {"city": "Bern"} and finish == "tool_calls"


def test_a_message_with_reasoning_and_calls_goes_back(client):
    (choice,) = client.chat.completions.create(model=MODEL, messages=ask("think and call"), tools=TOOLS).choices
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "fine"}
    messages = [*ask("think and call"), choice.message, result]
    (final,) = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices
    assert (final.message.content.strip(), final.message.reasoning_content.strip()) == ("Done.", "It came back.")
