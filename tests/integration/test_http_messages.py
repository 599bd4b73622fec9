"""/v1/messages: translation of requests, assembled streams, and authorization."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from gateway.flow.events import TextDelta
from gateway.text.formats import TOOL_FORMATS, ModelFormats
from gateway.text.message_parser import ToolCallDelta
from gateway.text.reasoning import REASONING_FORMATS
from tests.fakes.fake_generator import MODEL, SUPPORT, FakeEntry, FakeGenerator, FakeModels, Step, facts, spell
from tests.fakes.http_gateway import OTHER_KEY, USER_KEY, parse_named_events, run_gateway

FORMATS = ModelFormats(
    reasoning=REASONING_FORMATS["think"],
    tools=TOOL_FORMATS["hermes"],
    template=SUPPORT,
    added_ids={"<think>": 1, "</think>": 2},
)
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
BASE: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"a": [1]}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "Rain."}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(content, **more):
    return {"type": "text", "text": content, **more}


@pytest.fixture
def gateway(gateway):
    gateway.models.entry.formats = FORMATS
    return gateway


async def ask(gateway, headers=None, **fields):
    status, body, _ = await gateway.post("/v1/messages", {**BASE, **fields}, **(headers or {}))
    return status, body


def message_of(events: Iterable[dict]) -> dict:
    """Assemble a stream as clients do: blocks follow each other, and no event follows the end."""
    message: dict = {}
    partial, open_index = "", None
    for event in events:
        assert message.get("ended") is None
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert open_index is None and event["index"] == len(message["content"])
                open_index, partial = event["index"], ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    assert delta[name]
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(partial or "{}")
            case "message_delta":
                assert open_index is None
                message.update(event["delta"])
                message["usage"].update(event["usage"])
            case "message_stop":
                message["ended"] = True
            case kind:
                assert kind == "ping"
    assert message.pop("ended")
    return message


async def test_a_conversation_becomes_a_chat(gateway):
    messages = [
        user(text("one", cache_control={"type": "ephemeral"})),
        {"role": "user", "content": "two"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                text("Let me see.", citations=None),
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": [1]}, "caller": {"type": "direct"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c2", "name": "look", "input": {}}]},
        user(RESULT, {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [text("x"), text("y")]}),
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": []},
        {"role": "system", "content": "Hurry."},
        user({"type": "tool_result", "tool_use_id": "c1"}, text("")),
    ]
    system = [text("Be"), text("brief.", cache_control={"type": "ephemeral", "ttl": "1h"})]
    status, body = await ask(gateway, messages=messages, system=system, tools=[TOOL])
    assert status == 200, body
    said = [
        {name: value for name, value in message.items() if name not in ("reasoning", "thinking", "name")}
        for message in gateway.models.entry.pipeline.messages[-1]
    ]
    call = {"type": "function"}
    assert said == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {**call, "id": "c1", "function": {"name": "look", "arguments": {"a": [1]}}},
                {**call, "id": "c2", "function": {"name": "look", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: x\ny", "tool_call_id": "c2"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "Hurry."},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "user", "content": ""},
    ]


async def test_parameters_become_those_of_chat(gateway):
    status, body = await ask(
        gateway,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["a", "b"],
        metadata={"user_id": "someone"},
        service_tier="standard_only",
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
        cache_control={"type": "ephemeral"},
        system=None,
    )
    assert status == 200, body
    request = gateway.generator.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 2000)
    assert sampling.thinking.max_tokens == 1024 and request.stop == ("a", "b") and request.n == 1
    assert gateway.models.entry.pipeline.template_kwargs[-1] == {"enable_thinking": True}
    await ask(gateway, thinking={"type": "disabled"})
    assert gateway.models.entry.pipeline.template_kwargs[-1] == {"enable_thinking": False}
    assert gateway.generator.requests[-1].sampling.thinking is None
    await ask(gateway, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert gateway.models.entry.pipeline.template_kwargs[-1] == {"enable_thinking": True}
    await ask(gateway)
    assert gateway.models.entry.pipeline.template_kwargs[-1] == {}


async def test_tool_choices(gateway):
    for choice, called in (
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "look"}, True),
        ({"type": "none"}, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
    ):
        status, body = await ask(gateway, tools=[TOOL], tool_choice=choice)
        assert status == 200, body
        assert bool(gateway.generator.requests[-1].grammar) is called, choice


async def test_output_format_is_accepted_at_both_places(gateway):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"xyzzy": {"type": "integer"}}}}
    assert (await ask(gateway, output_format=form))[0] == 200
    former = gateway.generator.requests[-1].grammar
    assert (await ask(gateway, output_config={"format": form}))[0] == 200
    assert former == gateway.generator.requests[-1].grammar and "xyzzy" in former


async def test_the_fields_of_agents_are_accepted(gateway):
    """Accept the fields that Claude Code sends with every request, on a model without reasoning."""
    agent = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "fallbacks": "default",
        "inference_geo": "global",
        "max_tokens": 32_000,
        "mcp_servers": [],
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s" * 36})},
        "output_config": {"effort": "high"},
        "speed": "standard",
        "system": [text("Be.", cache_control={"type": "ephemeral", "ttl": "1h", "scope": "global"})],
        "thinking": {"type": "enabled", "budget_tokens": 31_999, "block_binding": {}},
        "tools": [{**TOOL, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
    }
    pipeline = gateway.models.entry.pipeline
    status, body = await ask(gateway, {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}, **agent)
    assert status == 200, body
    assert pipeline.template_kwargs[-1] == {"enable_thinking": True}
    assert gateway.generator.requests[-1].sampling.thinking.max_tokens == 31_999
    pipeline.template_variables = frozenset()
    gateway.models.entry.formats = dataclasses.replace(FORMATS, reasoning=None)
    for thinking in (agent["thinking"], {"type": "adaptive"}, {"type": "disabled"}):
        status, body = await ask(gateway, **{**agent, "thinking": thinking})
        assert status == 200, body
        assert pipeline.template_kwargs[-1] == {} and gateway.generator.requests[-1].sampling.thinking is None
    # Reasoning cannot be switched off if the template has no switch for it.
    gateway.models.entry.formats = FORMATS
    status, body = await ask(gateway, thinking={"type": "disabled"})
    assert status == 400 and "thinking.type" in body["error"]["message"]


async def test_max_tokens_0_only_fills_the_cache(gateway):
    status, whole = await ask(gateway, max_tokens=0)
    assert status == 200 and whole["content"] == [] and whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 0 < whole["usage"]["input_tokens"]
    streamed = message_of(parse_named_events(await gateway.stream_raw("/v1/messages", {**BASE, "max_tokens": 0})))
    assert {**streamed, "id": 0} == {**whole, "id": 0}


async def test_the_last_message_of_the_assistant_is_continued(gateway):
    status, body = await ask(gateway, messages=[*BASE["messages"], {"role": "assistant", "content": "The sky is"}])
    assert status == 200 and body["content"] == [{"type": "text", "text": "Hello"}]
    prompt = bytes(gateway.generator.requests[-1].prompt_token_ids)
    assert not prompt.endswith(b"assistant:") and b"The sky is" in prompt


async def test_max_tokens_beyond_the_context():
    models = FakeModels(FakeEntry(facts(max_model_len=64)))
    async with run_gateway(FakeGenerator(spell("ab", "length")), models) as gateway:
        for asked, reason in ((32_000, "model_context_window_exceeded"), (2, "max_tokens")):
            status, body = await ask(gateway, max_tokens=asked)
            assert status == 200 and body["stop_reason"] == reason
        request = gateway.generator.requests[0]
        assert len(request.prompt_token_ids) + request.sampling.max_tokens == 64
        status, body = await ask(gateway, messages=[{"role": "user", "content": "x" * 64}])
        assert status == 400 and "prompt is too long" in body["error"]["message"]


def cuts(text: str, dice: random.Random) -> list[str]:
    places = sorted(dice.sample(range(len(text) + 1), k=min(len(text) + 1, dice.randrange(4))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def random_answer(dice: random.Random) -> list[TextDelta]:
    """Return reasoning, text, calls and white space in any order, each split into random pieces."""
    deltas, calls = [TextDelta(0, "", [], num_cached_tokens=1)], 0
    for _ in range(dice.randrange(6)):
        match dice.choice("rtcw"):
            case "r":
                deltas += [TextDelta(0, "", [1], reasoning=piece) for piece in cuts("Hm \u00e9 \U0001f600", dice)]
            case "t":
                deltas += [TextDelta(0, piece, [1]) for piece in cuts(' \n"Yes" \u2028 no ', dice)]
            case "w":
                deltas += [TextDelta(0, piece, [1]) for piece in cuts("\n \n", dice)]
            case "c":
                begin = ToolCallDelta(calls, "", id=f"c{calls}", name="look")
                more = [ToolCallDelta(calls, piece) for piece in cuts('{"a": "\\u00e9 {"}', dice)]
                calls += 1
                if dice.random() < 0.5:
                    deltas.append(TextDelta(0, "", [1], tool_calls=[begin, *more]))
                else:
                    deltas += [TextDelta(0, "", [1], tool_calls=[call]) for call in (begin, *more)]
    return [*deltas, TextDelta(0, "", [1], finish_reason="tool_calls" if calls else "stop")]


@pytest.mark.parametrize(("own", "shown"), [("call_Ab9", "toolu_Ab9"), ("Ab9Ab9Ab9", "toolu_Ab9Ab9Ab9")])
async def test_call_ids_have_anthropics_form_and_are_kept(own, shown):
    call = TextDelta(0, "", [1], tool_calls=[ToolCallDelta(0, "{}", id=own, name="look")], finish_reason="tool_calls")
    generator = FakeGenerator(lambda _: [call])
    async with run_gateway(generator, FakeModels(FakeEntry(formats=FORMATS))) as gateway:
        _, whole = await ask(gateway)
        (streamed,) = message_of(parse_named_events(await gateway.stream_raw("/v1/messages", BASE)))["content"]
        assert whole["content"] == [streamed] and streamed["id"] == shown
        turn = {"role": "assistant", "content": whole["content"]}
        told = user({"type": "tool_result", "tool_use_id": shown, "content": "Rain."})
        status, body = await ask(gateway, messages=[*BASE["messages"], turn, told], tools=[TOOL])
        assert status == 200, body
        called, result = gateway.models.entry.pipeline.messages[-1][-2:]
        assert called["tool_calls"][0]["id"] == result["tool_call_id"] == shown


async def test_a_stream_adds_up_to_the_whole_message():
    generator = FakeGenerator()
    async with run_gateway(generator) as gateway:
        for seed in range(60):
            deltas = random_answer(random.Random(seed))
            generator.script = lambda _, deltas=deltas: deltas
            _, whole = await ask(gateway)
            streamed = message_of(parse_named_events(await gateway.stream_raw("/v1/messages", BASE)))
            assert {**streamed, "id": 0} == {**whole, "id": 0}, seed
            said = "".join(block.get("text", "") for block in whole["content"])
            assert said.split() == "".join(delta.text for delta in deltas).split()
            thought = "".join(block.get("thinking", "") for block in whole["content"])
            assert thought == "".join(delta.reasoning for delta in deltas)
            assert all(block["text"].strip() for block in whole["content"] if block["type"] == "text")
            calls = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
            assert calls == [{"a": "\u00e9 {"}] * len(calls)


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "nonsense", '"a"'])
async def test_arguments_other_than_objects(gateway, arguments):
    call = ToolCallDelta(0, arguments, id="c", name="look")
    script = [TextDelta(0, "", [1], tool_calls=[call]), TextDelta(0, "", [], finish_reason="length")]
    gateway.generator.script = lambda _: script
    _, body = await ask(gateway)
    assert body["content"][0]["input"] == {"INVALID_JSON": arguments} and body["stop_reason"] == "max_tokens"


async def test_versions(gateway):
    assert (await ask(gateway))[0] == 200
    for version in ("2023-06-01", "2026-10-21"):
        assert (await ask(gateway, {"anthropic-version": version, "anthropic-beta": "any"}))[0] == 200
    for version in ("2023-01-01", "2099-01-01", ""):
        status, body = await ask(gateway, {"anthropic-version": version})
        assert status == 400 and "anthropic-version" in body["error"]["message"]
    for name in ("temperature", "top_p", "top_k"):
        assert (await ask(gateway, {"anthropic-version": "2023-06-01"}, **{name: 1}))[0] == 200
        status, body = await ask(gateway, {"anthropic-version": "2026-10-21"}, **{name: 1})
        assert status == 400 and name in body["error"]["message"]


async def test_keys():
    async with run_gateway(keys=True) as gateway:
        for headers in ({"x-api-key": USER_KEY}, {"Authorization": f"Bearer {USER_KEY}"}):
            assert (await ask(gateway, headers))[0] == 200
        assert (await ask(gateway, {"x-api-key": USER_KEY, "Authorization": f"Bearer {USER_KEY}"}))[0] == 200
        assert (await ask(gateway, {"x-api-key": OTHER_KEY}))[0] == 200
        for headers in (
            {},
            {"x-api-key": ""},
            {"x-api-key": USER_KEY[:-1]},
            {"x-api-key": f"Bearer {USER_KEY}"},
            # A proxy may have examined either header.
            {"x-api-key": USER_KEY, "Authorization": f"Bearer {OTHER_KEY}"},
            {"x-api-key": USER_KEY, "Authorization": "Basic abc"},
        ):
            status, body = await ask(gateway, headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        answer = await gateway.raw(
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n"
            b"x-api-key: %b\r\nx-api-key: %b\r\n\r\n" % (USER_KEY.encode(), USER_KEY.encode())
        )
        assert answer.startswith(b"HTTP/1.1 401") and b"authentication_error" in answer
        salts = [request.salt for request in gateway.generator.requests]
        assert len(set(salts)) == 2 and len(set(salts[:3])) == 1


async def test_tokens_are_counted_as_they_are_used(gateway):
    body = {"model": MODEL, "messages": BASE["messages"], "system": "Be brief.", "thinking": {"type": "disabled"}}
    status, answer, _ = await gateway.post("/v1/messages/count_tokens", body)
    _, used = await ask(gateway, system="Be brief.")
    assert status == 200 and answer == {"input_tokens": used["usage"]["input_tokens"]}
    # Also beyond the context, within limits.
    for length, expected in ((50_000, 200), (200_000, 400)):
        long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * length}]}
        status, answer, _ = await gateway.post("/v1/messages/count_tokens", long)
        assert status == expected and (status == 400 or answer["input_tokens"] > length)
    status, answer, _ = await gateway.post("/v1/messages/count_tokens", BASE)
    assert status == 400 and "max_tokens" in answer["error"]["message"]


async def test_silence_is_filled_with_pings_and_a_disconnect_cancels():
    begin = asyncio.Event()
    script: list[Step] = [begin, TextDelta(0, "a", [1]), asyncio.Event()]
    async with run_gateway(FakeGenerator(lambda _: script), keepalive_interval=0.03) as gateway:
        async with gateway.session.post(gateway.url + "/v1/messages", json={**BASE, "stream": True}) as response:
            seen = await response.content.readuntil(b"\n\n")
            begin.set()
            async with asyncio.timeout(40):
                while seen.count(b"event: ping") < 3:
                    seen += await response.content.readany()
            # Before message_start only a comment shows that the stream is alive.
            assert seen.startswith(b": keep-alive\n\n") and seen.index(b"event: ping") > seen.index(b"message_start")
        assert await gateway.generations_left() == 0
        assert gateway.generator.generations[0].cancelled
