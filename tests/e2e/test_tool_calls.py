"""Enforced tool calls of the default model, whose template has no tools and which is too weak to choose them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.server import Server
from tests.fakes.tool_sets import TOOL_SETS

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
WEATHER = TOOL_SETS[0][1][0]


def ask(server: Server, question: str, tools: list[dict[str, Any]], **fields: Any) -> Any:
    body = {"model": MODEL, "temperature": 0.0, "max_tokens": 400, "tools": tools, **fields}
    messages = body.pop("messages", [{"role": "user", "content": question}])
    with server.client() as client:
        answer = client.chat.completions.create(messages=messages, **body)
        return list(answer) if body.get("stream") else answer.choices[0]


def parameters_of(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in tools}


def check_calls(choice: Any, tools: list[dict[str, Any]]) -> None:
    """Check that each call names one of the tools and has valid arguments."""
    schemas = parameters_of(tools)
    assert choice.message.tool_calls and not choice.message.content
    for call in choice.message.tool_calls:
        values = json.loads(call.function.arguments)
        jsonschema.Draft202012Validator(schemas[call.function.name], format_checker=FORMATS).validate(values)
        assert isinstance(values, dict)


def collected(chunks: list[Any]) -> tuple[str, list[tuple[str, str]], str | None]:
    """Return the content, the name and arguments of each call, and the finish reason."""
    content, finish = "", None
    calls: list[list[str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls) and call.function.arguments == ""
                    calls.append([call.function.name, ""])
                else:
                    calls[call.index][1] += call.function.arguments
    return content, [(name, arguments) for name, arguments in calls], finish


def test_fifty_sets_of_tools(server):
    def one(index: int) -> Any:
        question, tools = TOOL_SETS[index]
        return ask(server, question, tools, tool_choice="required", parallel_tool_calls=False)

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(one, range(len(TOOL_SETS))))
    assert len(choices) == 50
    for (_, tools), choice in zip(TOOL_SETS, choices, strict=True):
        assert choice.finish_reason == "tool_calls"
        check_calls(choice, tools)
        assert len(choice.message.tool_calls) == 1
    assert len({choice.message.tool_calls[0].function.name for choice in choices}) > 20


def test_named_tools(server):
    def one(index: int) -> Any:
        question, tools = TOOL_SETS[index]
        named = {"type": "function", "function": {"name": tools[-1]["function"]["name"]}}
        return ask(server, question, tools, tool_choice=named)

    sets = range(3, len(TOOL_SETS), 6)
    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(one, sets))
    for index, choice in zip(sets, choices, strict=True):
        tools = TOOL_SETS[index][1]
        check_calls(choice, tools)
        (call,) = choice.message.tool_calls
        assert call.function.name == tools[-1]["function"]["name"]
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("index", [3, 8, 21])
def test_a_stream_is_the_same_message(server, index):
    question, tools = TOOL_SETS[index]
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 7}
    whole = ask(server, question, tools, **fields)
    content, calls, finish = collected(ask(server, question, tools, stream=True, **fields))
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert (content, finish) == ("", whole.finish_reason)


def test_parallel_calls_validate_and_end(server):
    tools = [WEATHER, TOOL_SETS[3][1][0]]
    num_whole = 0
    for seed in range(3):
        choice = ask(
            server,
            "Oslo and Rome, and the lamp.",
            tools,
            tool_choice="required",
            temperature=1.0,
            seed=seed,
            max_tokens=600,
        )
        if choice.finish_reason == "tool_calls":
            check_calls(choice, tools)
            num_whole += 1
    assert num_whole


def test_a_truncated_call_is_length(server):
    """vllm#53269: the finish reason of truncated JSON is not `tool_calls`, streamed or not."""
    fields: dict[str, Any] = {"tool_choice": "required", "max_tokens": 16}
    whole = ask(server, "What is the weather in Oslo?", [WEATHER], **fields)
    content, calls, finish = collected(ask(server, "What is the weather in Oslo?", [WEATHER], stream=True, **fields))
    assert whole.finish_reason == finish == "length"
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert content == (whole.message.content or "")


def test_auto_answers_in_words_or_with_calls_that_validate(server):
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    for tools in ([WEATHER], [strict]):
        choice = ask(server, "Hello! Who are you?", tools, max_tokens=60)
        if choice.message.tool_calls:
            assert {call.function.name for call in choice.message.tool_calls} == {"get_weather"}
        else:
            assert choice.message.content and choice.finish_reason in ("stop", "length")


def test_a_tool_loop_goes_on_with_results(server):
    """The template supports neither calls nor the role tool."""
    call = ask(server, "What is the weather in Oslo?", [WEATHER], tool_choice="required").message.tool_calls[0]
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
    ]
    choice = ask(server, "", [WEATHER], messages=messages, tool_choice="none", max_tokens=40)
    assert choice.message.content and not choice.message.tool_calls


def test_structured_content_beside_tools(server):
    """The message is an answer that follows response_format, or a valid call."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    num_whole = 0
    for seed in range(4):
        choice = ask(
            server, "Who are you?", [WEATHER], response_format=form, temperature=1.0, seed=seed, max_tokens=200
        )
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            check_calls(choice, [WEATHER])
            num_whole += 1
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
            num_whole += 1
    assert num_whole


def test_a_schema_that_cannot_be_followed_is_named(server):
    """CVE-2025-48944: a schema that no grammar can follow is refused where it would have to be enforced."""
    bad = json.loads(json.dumps(WEATHER))
    for change in ({"type": "stsring"}, {"type": "string", "pattern": "(unclosed"}):
        bad["function"]["parameters"]["properties"]["city"] = change
        for choice in ("auto", "required"):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(
                    server,
                    "Oslo?",
                    [WEATHER, {**bad, "function": {**bad["function"], "name": "g"}}],
                    tool_choice=choice,
                )
            assert caught.value.param == "tools[1].function.parameters"
    bad["function"]["parameters"]["properties"]["city"] = {"type": "array", "uniqueItems": True}
    assert ask(server, "Oslo?", [bad], tool_choice="required").message.tool_calls
    bad["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(server, "Oslo?", [bad], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters"
