"""LangChain's ChatOpenAI against a real gateway."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.clients.answers import HELLO, KEY, PERSON, WEATHER, Person
from tests.fakes.prepared_server import MODEL


@tool
def get_weather(city: str, days: int = 1, detail: dict | None = None) -> str:
    """The weather in a city."""
    return '{"sky": "sunny"}'


@pytest.fixture(scope="module")
def chat(server) -> Iterator[ChatOpenAI]:
    # LangChain shares one HTTP client among all models of an address; once closed, it stays closed.
    model = ChatOpenAI(
        base_url=server.url + "/v1", api_key=SecretStr(KEY), model=MODEL, temperature=0.2, max_retries=0, timeout=30
    )
    yield model
    model.root_client.close()


def test_invoke(chat, server):
    answer = chat.invoke([SystemMessage("Be kind."), HumanMessage("hello")])
    assert answer.content == HELLO and answer.response_metadata["finish_reason"] == "stop"
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] > 1
    assert server.worker.submits()[-1].sampling.temperature == 0.2


def test_stream(chat):
    chunks = list(chat.stream("hello", stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == HELLO
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata == chat.invoke("hello").usage_metadata
    assert whole.response_metadata["finish_reason"] == "stop"


async def test_async(chat):
    assert (await chat.ainvoke("hello")).content == HELLO
    assert "".join([str(chunk.content) async for chunk in chat.astream("hello")]) == HELLO
    assert [answer.content for answer in await chat.abatch(["hello", "hello"])] == [HELLO, HELLO]
    await chat.root_async_client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(chat, stream):
    bound = chat.bind_tools([get_weather])
    messages: list[BaseMessage] = [HumanMessage("weather?")]

    def ask() -> AIMessage:
        if not stream:
            return bound.invoke(messages)
        whole, *rest = bound.stream(messages)
        for chunk in rest:
            whole += chunk
        return whole

    answer = ask()
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", WEATHER) and call["id"]
    assert not answer.invalid_tool_calls and answer.response_metadata["finish_reason"] == "tool_calls"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    messages += [answer, result]
    final = ask()
    assert final.content == "It is sunny there." and not final.tool_calls


def test_tool_choice(chat, server):
    (call,) = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("only a call").tool_calls
    assert call["args"] == {"city": "Bern"}
    assert "get_weather" in server.worker.submits()[-1].grammar
    (call,) = chat.bind_tools([get_weather], tool_choice="any").invoke("only a call").tool_calls
    assert call["name"] == "get_weather" and server.worker.submits()[-1].grammar
    assert not chat.bind_tools([get_weather], tool_choice="none").invoke("hello").tool_calls


# The SDK declares its parsed value as None, and LangChain copies it.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_structured_output_by_schema(chat, server):
    person = chat.with_structured_output(Person, method="json_schema", strict=True).invoke("person?")
    assert person == Person(**PERSON)
    assert "languages" in server.worker.submits()[-1].grammar
    *_, last = chat.with_structured_output(Person, method="json_schema").stream("person?")
    assert last == person
    plain = chat.with_structured_output(method="json_mode", schema=Person).invoke("person?")
    assert plain == person


def test_structured_output_by_a_function(chat):
    answer = chat.with_structured_output(Person, method="function_calling", include_raw=True).invoke("call a person")
    assert answer["parsed"] == Person(**PERSON) and answer["parsing_error"] is None


def test_errors(chat):
    with pytest.raises(openai.BadRequestError) as error:
        chat.bind(temperature=7).invoke("hello")
    assert error.value.param == "temperature"
    # LangChain recognizes the message, and programs then shorten the conversation. Both the byte and the token limit
    # apply.
    for question in ("hello " * 20_000, "x" * 5000):
        with pytest.raises(ContextOverflowError, match="maximum context length") as too_long:
            chat.invoke(question)
        assert isinstance(too_long.value, openai.BadRequestError) and too_long.value.code == "context_length_exceeded"


def test_the_responses_api(server):
    model = ChatOpenAI(
        base_url=server.url + "/v1", api_key=SecretStr(KEY), model=MODEL, max_retries=0, use_responses_api=True
    )
    assert model.invoke("hello").text == HELLO
    assert "".join(chunk.text for chunk in model.stream("think")) == "Four."
    caller = model.bind_tools([get_weather])
    asked = caller.invoke("weather?")
    assert isinstance(asked, AIMessage) and asked.tool_calls[0]["args"] == WEATHER
    result = ToolMessage('{"sky": "grey"}', tool_call_id=asked.tool_calls[0]["id"])
    assert caller.invoke([HumanMessage("weather?"), asked, result]).text == "It is grey there."
