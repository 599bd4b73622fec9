"""Anthropic's official Python client, sync and async, against a real gateway in typical programs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.answers import HELLO, KEY, PARAMETERS, WEATHER, Person
from tests.fakes.hermes import conversation
from tests.fakes.prepared_server import MODEL

TOOLS: list = [{"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}]


def ask(question: str) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1000, "messages": [{"role": "user", "content": question}]}


@pytest.fixture
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


def test_a_message(client):
    message = client.messages.create(**ask("hello"))
    (block,) = message.content
    assert block.type == "text" and block.text == HELLO
    assert message.type == "message" and message.role == "assistant" and message.model == MODEL
    assert message.id.startswith("msg_") and message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0
    assert message.usage.cache_read_input_tokens == 0 and message._request_id


def test_the_stream_is_the_message(client):
    whole = client.messages.create(**ask("hello"))
    events = list(client.messages.create(**ask("hello"), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == HELLO
    with client.messages.stream(**ask("hello")) as stream:
        assert "".join(stream.text_stream) == HELLO
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "end_turn"
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_async_clients_side_by_side(server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:

        async def stream() -> str:
            async with client.messages.stream(**ask("hello")) as events:
                return "".join([text async for text in events.text_stream])

        assert await asyncio.gather(*(stream() for _ in range(6))) == [HELLO] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(client, stream):
    fields = {**ask("weather?"), "tools": TOOLS}
    if stream:
        with client.messages.stream(**fields) as events:
            pieces = [event.partial_json for event in events if event.type == "input_json"]
            message = events.get_final_message()
        assert len(pieces) > 1
    else:
        message = client.messages.create(**fields)
    text, call = message.content
    assert text.text.strip() == "Let me look." and message.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", WEATHER)
    assert call.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "clear"}'}
    # The SDK's own objects are sent back, as its documentation shows.
    fields["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(**fields)
    assert final.content[0].text == "It is clear there." and final.stop_reason == "end_turn"


def test_parallel_calls_and_their_results(client):
    fields = {**ask("two cities?"), "tools": TOOLS}
    with client.messages.stream(**fields) as events:
        streamed = events.get_final_message()
    message = client.messages.create(**fields)
    # White space between calls is not a block.
    assert [block.type for block in message.content] == ["tool_use", "tool_use"]
    assert [block.input for block in message.content] == [{"city": "Bern"}, {"city": "Rome"}]
    assert [block.input for block in streamed.content] == [block.input for block in message.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": text}]}
        for block, text in zip(message.content, ("12 in Bern", "20 in Rome"), strict=True)
    ]
    fields["messages"] += [message.to_param(), {"role": "user", "content": results}]
    assert client.messages.create(**fields).content[0].text == "12 in Bern and 20 in Rome"


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]
)
def test_forced_calls(client, server, choice):
    message = client.messages.create(**ask("only a call"), tools=TOOLS, tool_choice=choice)
    (call,) = message.content
    assert call.input == {"city": "Bern"} and message.stop_reason == "tool_use"
    assert "get_weather" in server.worker.submits()[-1].grammar


def test_thinking(client):
    fields = {**ask("think and call"), "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    fields["max_tokens"] = 1500
    with client.messages.stream(**fields) as events:
        thoughts = "".join(event.thinking for event in events if event.type == "thinking")
        message = events.get_final_message()
    thinking, call = message.content
    assert thinking.type == "thinking" and thinking.thinking == thoughts == "I should look."
    assert thinking.signature and call.input == {"city": "Bern"}
    assert client.messages.create(**fields).content[0] == thinking
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "fine"}
    fields["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(**fields)
    assert [block.type for block in final.content] == ["thinking", "text"] and final.content[1].text.strip() == "Done."


def test_stop_sequences_and_lengths(client):
    message = client.messages.create(**ask("hello"), stop_sequences=["zzz", '"you'])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", '"you')
    assert message.content[0].text == HELLO[: HELLO.index('"you')]
    with client.messages.stream(**ask("hello"), stop_sequences=['"you']) as events:
        final = events.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", '"you')
    assert final.content[0].text == message.content[0].text
    short = client.messages.create(**{**ask("hello"), "max_tokens": 2})
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 2


def test_parsed_output(client, server):
    message = client.messages.parse(**ask("person?"), output_format=Person)
    assert message.parsed_output.name == "Ada" and "languages" in server.worker.submits()[-1].grammar
    with client.messages.stream(**ask("person?"), output_format=Person) as events:
        assert events.get_final_message().parsed_output.name == "Ada"


def test_errors(client, server):
    with pytest.raises(anthropic.BadRequestError, match="temperature") as bad:
        client.messages.create(**ask("hello"), extra_body={"temperature": "hot"})
    body: Any = bad.value.body
    assert bad.value.type == "invalid_request_error" and bad.value.request_id == body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ask("hello"), "model": "nobody"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="sk-wrong").messages.create(**ask("hello"))
    assert refused.value.type == "authentication_error"
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as by_token:
        assert by_token.messages.create(**ask("hello")).content[0].text == HELLO


def test_a_stream_that_breaks(client):
    stream = client.messages.create(**ask("break"), stream=True)
    with pytest.raises(anthropic.APIStatusError) as broken:
        list(stream)
    body: Any = broken.value.body
    assert set(body) == {"type", "error", "request_id"} and body["error"]["type"] in ("api_error", "overloaded_error")


def test_the_beta_client_asks_the_same_route(client):
    message = client.beta.messages.create(**ask("hello"), betas=["fine-grained-tool-streaming-2025-05-14"])
    assert message.content[0].text == HELLO
    with client.beta.messages.stream(**ask("hello"), betas=["context-management-2025-06-27"]) as stream:
        assert stream.get_final_message().content[0].text == HELLO
    parsed = client.beta.messages.parse(**ask("person?"), output_format=Person)
    assert parsed.parsed_output.name == "Ada"
    fields = ask("hello")
    del fields["max_tokens"]
    assert client.beta.messages.count_tokens(**fields).input_tokens > 0


def test_a_loop_with_the_fields_of_agents(client, server):
    """Send every hint that Claude Code sends, on each request of a loop."""
    cached: Any = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    fields: dict[str, Any] = {
        **ask("think and call"),
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=00000;"},
            {"type": "text", "text": "Be brief.", "cache_control": cached},
        ],
        "tools": [{**TOOLS[0], "eager_input_streaming": True, "cache_control": cached}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "user_abc_account__session_def"},
    }
    with client.beta.messages.stream(**fields) as events:
        first = events.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "fine", "cache_control": cached}
    former: Any = [{"type": "redacted_thinking", "data": "from another server"}, *first.content]
    fields["messages"] += [{"role": "assistant", "content": former}, {"role": "user", "content": [result]}]
    with client.beta.messages.stream(**fields) as events:
        assert events.get_final_message().content[-1].text.strip() == "Done."
    (system, *_) = conversation(server.worker.submits()[-1].token_ids)
    assert system[1].startswith("Be brief.\n")


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(client, stream):
    seen = []

    @anthropic.beta_tool(name="get_weather")
    def look(city: str) -> str:
        """Return the weather."""
        seen.append(city)
        return "fine"

    runner: Any = client.beta.messages.tool_runner(**ask("think and call"), tools=[look], stream=stream)
    final = runner.until_done()
    assert final.content[-1].text.strip() == "Done." and seen == ["Bern"]


def test_models(client):
    (model,) = client.models.list()
    assert model == client.models.retrieve(MODEL) and model.id == model.display_name == MODEL
    assert model.type == "model" and model.lifecycle == "active" and model.created_at.tzinfo is not None
    assert model.max_input_tokens == model.max_tokens == 4096
    capabilities = model.capabilities
    assert capabilities.thinking.types.enabled.supported and not capabilities.image_input.supported
    assert list(client.models.list(after_id=MODEL)) == list(client.models.list(before_id=MODEL)) == []
    assert [one.id for one in client.beta.models.list(limit=1)] == [MODEL]
