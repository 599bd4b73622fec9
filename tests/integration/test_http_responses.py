"""/v1/responses over HTTP: refused requests, ownership, storage and expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from gateway.flow.events import TextDelta
from shared.errors import WorkerLostError
from tests.fakes.fake_generator import MODEL, FakeEntry, FakeModels, facts, spell
from tests.fakes.http_gateway import ADMIN_KEY, OTHER_KEY, USER_KEY, Gateway, run_gateway

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def create(gateway: Gateway, **fields: Any) -> tuple[int, Any]:
    status, body, _ = await gateway.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})
    return status, body


async def ask(gateway: Gateway, method: str, path: str, **headers: str) -> tuple[int, Any]:
    async with gateway.session.request(method, gateway.url + path, headers={**gateway.headers, **headers}) as response:
        return response.status, orjson.loads(await response.read())


MESSAGE = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
PART = "input[0].content[0]"


def part(kind: str, **fields: Any) -> dict[str, Any]:
    role = "assistant" if kind == "output_text" else "user"
    return {"role": role, "content": [{"type": kind, "text": "x", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"no_such": 1}, "no_such"),
        ({"messages": []}, "messages"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"truncation": "left"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}] * 513}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{**MESSAGE, "role": "tool"}]}, "input[0].role"),
        ({"input": [{**MESSAGE, "name": "x"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x", "role": "user"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x" * 257}]}, "input[0].id"),
        ({"input": [{"id": ""}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": "x", "id": "x" * 257}]}, "input[0].id"),
        ({"input": [MESSAGE, {**CALL, "arguments": 1}]}, "input[1].arguments"),
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"input": [CALL, {**OUTPUT, "output": []}]}, "input[1].output"),
        ({"input": [CALL, {**OUTPUT, "name": 7}]}, "input[1].name"),
        ({"input": [{"role": "assistant", "content": "y", "phase": "thinking"}]}, "input[0].phase"),
        ({"input": [part("input_text", prompt_cache_breakpoint={})]}, f"{PART}.prompt_cache_breakpoint.mode"),
        # Other values than lists are not empty lists.
        ({"input": [part("output_text", annotations=0), MESSAGE]}, f"{PART}.annotations"),
        ({"input": [part("output_text", logprobs=""), MESSAGE]}, f"{PART}.logprobs"),
        ({"input": [{"type": "reasoning", "summary": [], "content": False}, MESSAGE]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": [], "summary": {}}, MESSAGE]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ],
)  # fmt: skip
async def test_refused_fields_are_named(gateway, fields, param):
    status, body = await create(gateway, **fields)
    assert status == 400, body
    assert body["error"]["param"] == param, body
    assert not gateway.generator.requests


async def test_items_become_one_conversation(gateway):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "One moment.", "annotations": []}]},
        CALL,
        {**CALL, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    assert (await create(gateway, input=items, instructions="First."))[0] == 200
    (messages,) = gateway.models.entry.pipeline.messages
    assert [message["role"] for message in messages] == [
        "system", "system", "user", "assistant", "tool", "tool", "assistant", "assistant",
    ]  # fmt: skip
    turn = messages[3]
    assert turn["content"] == "One moment." and turn["reasoning_content"] == "Hm." and len(turn["tool_calls"]) == 2
    assert messages[2]["content"] == "a\nb"


async def test_instructions_are_not_carried_over(gateway):
    first = (await create(gateway, instructions="First."))[1]
    second = (await create(gateway, input="more", previous_response_id=first["id"], instructions="Second."))[1]
    assert (await create(gateway, input="and", previous_response_id=second["id"]))[0] == 200
    said = [[message["content"] for message in messages] for messages in gateway.models.entry.pipeline.messages]
    assert said[1] == ["Second.", "hi", "Hello", "more"]
    assert said[2] == ["hi", "Hello", "more", "Hello", "and"]


async def test_responses_are_private_to_their_key():
    async with run_gateway(keys=True) as gateway:
        gateway.headers["Authorization"] = f"Bearer {USER_KEY}"
        made = (await create(gateway))[1]["id"]
        for key in (OTHER_KEY, ADMIN_KEY):
            other = {"Authorization": f"Bearer {key}"}
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                assert (await ask(gateway, method, f"/v1/responses/{made}{path}", **other))[0] == 404
            body = {"model": MODEL, "input": "x", "previous_response_id": made}
            status, answer, _ = await gateway.post("/v1/responses", body, **other)
            assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
        assert (await ask(gateway, "GET", f"/v1/responses/{made}"))[0] == 200


async def test_cancel_refuses_unknown_fields(gateway):
    made = await background(gateway, TextDelta(0, "Hel", [1]), asyncio.Event())
    path = f"/v1/responses/{made}/cancel"
    for wrong, code in ((b'{"a": 1}', "unknown_parameter"), (b'"a"', "invalid_json"), (b"{", "invalid_json")):
        status, body, _ = await gateway.post(path, wrong)
        assert (status, body["error"]["code"]) == (400, code)
    assert body["error"]["param"] is None
    status, body, _ = await gateway.post(path, b"a=1", **{"Content-Type": "application/x-www-form-urlencoded"})
    assert status == 415
    assert (await ask(gateway, "GET", f"/v1/responses/{made}"))[1]["status"] != "cancelled"
    for right in (b"{}", b""):
        status, body, _ = await gateway.post(path, right)
        assert (status, body["status"]) == (200, "cancelled")


async def background(gateway: Gateway, *steps: Any) -> str:
    gateway.generator.script = lambda _: list(steps)
    status, body = await create(gateway, background=True)
    assert status == 200 and body["status"] == "queued"
    return str(body["id"])


async def test_a_running_background_response_can_be_read_and_cancelled(gateway):
    made = await background(gateway, TextDelta(0, "Hel", [1]), asyncio.Event())
    for _ in range(4000):
        status, body = await ask(gateway, "GET", f"/v1/responses/{made}")
        if body["status"] == "in_progress":
            break
        await asyncio.sleep(0.01)
    assert (status, body["status"]) == (200, "in_progress")
    assert (await create(gateway, previous_response_id=made))[0] == 400
    status, body = await ask(gateway, "POST", f"/v1/responses/{made}/cancel")
    assert (status, body["status"]) == (200, "cancelled")
    assert body["output"][0]["content"][0]["text"] == "Hel" and body["output"][0]["status"] == "incomplete"
    assert await gateway.generations_left() == 0
    assert (await ask(gateway, "POST", f"/v1/responses/{made}/cancel"))[1]["status"] == "cancelled"
    made = await background(gateway, TextDelta(0, "Hel", [1]), asyncio.Event())
    assert (await ask(gateway, "DELETE", f"/v1/responses/{made}"))[0] == 200
    assert await gateway.generations_left() == 0
    assert (await ask(gateway, "GET", f"/v1/responses/{made}"))[0] == 404


@pytest.mark.parametrize("begun", [False, True])
async def test_a_failed_background_response_has_the_error(gateway, begun):
    made = await background(gateway, *[TextDelta(0, "Hel", [1])] * begun, 0.01, WorkerLostError("The worker died."))
    for _ in range(4000):
        body = (await ask(gateway, "GET", f"/v1/responses/{made}"))[1]
        if body["status"] == "failed":
            break
        await asyncio.sleep(0.01)
    assert body["status"] == "failed" and body["error"]["message"] == "The worker died."


async def test_events_of_a_background_response_are_resumed(gateway):
    gateway.generator.script = spell("Hello")
    body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
    async with gateway.session.post(gateway.url + "/v1/responses", json=body) as response:
        whole = await response.read()
    events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
    made = orjson.loads(events[0].partition(b"data: ")[2])["response"]["id"]
    for seen in range(len(events) - 1):
        status, rest, _ = await gateway.get(f"/v1/responses/{made}?stream=true&starting_after={seen}")
        assert (status, rest) == (200, b"".join(events[seen + 1 :]))
    assert (await gateway.get(f"/v1/responses/{made}?stream=true&starting_after={len(events) - 1}"))[0] == 204
    for query in (
        "stream=true&starting_after=99",
        "starting_after=1",
        "other=1",
        "stream=1",
        "stream=true&include_obfuscation=true",
    ):
        assert (await gateway.get(f"/v1/responses/{made}?{query}"))[0] == 400
    assert (await gateway.get(f"/v1/streams/{made}"))[0] == 404


async def test_pages_of_input_items(gateway):
    made = (await create(gateway, input=[{"role": "user", "content": str(index)} for index in range(5)]))[1]["id"]
    path = f"/v1/responses/{made}/input_items"
    first = (await ask(gateway, "GET", path + "?limit=2"))[1]
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"] and first["has_more"]
    rest = (await ask(gateway, "GET", path + f"?limit=3&after={first['last_id']}"))[1]
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"] and not rest["has_more"]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=x", "before=x"):
        status, body = await ask(gateway, "GET", f"{path}?{query}")
        assert status == 400 and body["error"]["param"] == query.partition("=")[0]


async def test_truncation_leaves_out_the_oldest_turns():
    async with run_gateway(models=FakeModels(FakeEntry(facts(max_model_len=100)))) as gateway:
        turns = [{"role": "user", "content": f"{index} " * 10} for index in range(9)]
        assert (await create(gateway, input=turns, instructions="Rule."))[0] == 400
        status, body = await create(gateway, input=turns, instructions="Rule.", truncation="auto")
        assert status == 200 and body["truncation"] == "auto"
        used = bytes(gateway.generator.requests[-1].prompt_token_ids).decode()
        assert used.startswith("system: Rule.") and "8 8" in used and "0 0" not in used
        left_out = used.count("user:")
        assert len(used) + 27 > 99, f"no more than needed: {left_out}"
        status, body = await create(gateway, input="x" * 200, truncation="auto")
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
