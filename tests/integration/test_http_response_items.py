"""/v1/responses: items sent back by reference or with encrypted reasoning, and strictness of tools."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.flow.events import TextDelta
from gateway.text.formats import TOOL_FORMATS, ModelFormats
from tests.fakes.fake_generator import MODEL, SUPPORT
from tests.fakes.http_gateway import OTHER_KEY, USER_KEY, Gateway, run_gateway
from tests.integration.test_http_responses import ask, create

PACKED = ["reasoning.encrypted_content"]
THINKING = [
    TextDelta(0, "", [1], reasoning="Hm, ünïcode\n", num_reasoning_tokens=1),
    TextDelta(0, "Four.", [2], finish_reason="stop"),
]
STRICT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def said(gateway: Gateway) -> list[Any]:
    """Return the last conversation."""
    return gateway.models.entry.pipeline.messages[-1]


async def test_an_agent_without_a_store_sends_its_reasoning_back(gateway):
    gateway.generator.script = lambda _: THINKING
    fields: dict[str, Any] = {"store": False, "include": PACKED, "reasoning": {"summary": "auto"}}
    status, body = await create(gateway, **fields)
    assert status == 200
    reasoning, message = body["output"]
    packed = reasoning["encrypted_content"]
    assert packed.isascii() and "encrypted_content" not in message
    # As agents do: without displayed items and without ids.
    back = {"type": "reasoning", "summary": [], "encrypted_content": packed}
    items = [{"role": "user", "content": "hi"}, back, message, {"role": "user", "content": "and?"}]
    assert (await create(gateway, input=items, **fields))[0] == 200
    turn = said(gateway)[1]
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "Four.", "Hm, ünïcode\n")
    # Also unchanged; the packed reasoning is used.
    both = {**reasoning, "content": [{"type": "reasoning_text", "text": "Something else."}]}
    assert (await create(gateway, input=[items[0], both, message, items[-1]]))[0] == 200
    assert said(gateway)[1]["reasoning_content"] == "Hm, ünïcode\n"


async def test_hints_without_effect_are_accepted(gateway):
    def text(**fields: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "input_text", "text": "x", **fields}]}

    marked = text(prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"})
    status, body = await create(gateway, input=[marked], prompt_cache_options={"mode": "implicit"})
    assert status == 200, body
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1", "name": "f"}
    made = (await create(gateway, input=[text(), call, output]))[1]["id"]
    listed = (await ask(gateway, "GET", f"/v1/responses/{made}/input_items?limit=1"))[1]["data"]
    assert listed[0]["name"] == "f"


async def test_a_history_with_phases_is_accepted(gateway):
    """OpenAI's models send phases, and its clients send them back as documented."""
    for kind in ({}, {"type": "message", "id": "msg_1", "status": "completed"}):
        asked = [
            {"role": "user", "content": "x"},
            *({**kind, "role": "assistant", "content": "y", "phase": phase} for phase in ("commentary", None)),
            {"role": "assistant", "content": [{"type": "output_text", "text": "z"}], "phase": "final_answer"},
            {"role": "user", "content": "x"},
        ]
        status, body = await create(gateway, input=asked)
        assert status == 200, body
        assert [message["content"] for message in said(gateway)] == ["x", "y", "y", "z", "x"]
        assert not any("phase" in message for message in said(gateway))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options"),
        ({"background_options": {"completion_window": "2h"}}, "background_options"),
        ({"access_programs": {}}, "access_programs"),
        ({"image": {"context_compression": "auto"}}, "image"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": 0}]}, "tools[0].defer_loading"),
        ({"tools": [{}, {"type": "function", "async": True}]}, "tools[1].async"),
        ({"tools": [{"type": "function", "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{"type": "function", "name": "f", "output_schema": {}}]}, "tools[0].output_schema"),
    ],
)  # fmt: skip
async def test_unsupported_fields_are_refused_with_a_reason(gateway, fields, param):
    status, body = await create(gateway, **fields)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "unsupported_parameter")
    assert body["error"]["message"].startswith(param) and ": " in body["error"]["message"]


async def test_values_without_effect_are_accepted(calling):
    asked: dict[str, Any] = {
        "reasoning": {"context": "auto", "mode": "standard", "summary": "auto", "generate_summary": None},
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "tools": [tool("f", STRICT, defer_loading=False, allowed_callers=["direct"], output_schema=None)],
        "moderation": None,
        "conversation": None,
    }
    status, body = await create(calling, **asked)
    assert status == 200, body
    assert body["text"] == {"format": {"type": "text"}} and body["tools"][0]["defer_loading"] is False


async def test_encrypted_reasoning_is_stored_once(gateway):
    gateway.generator.script = lambda _: THINKING
    made = (await create(gateway, include=PACKED))[1]
    assert (await ask(gateway, "GET", f"/v1/responses/{made['id']}"))[1] == made
    second = (await create(gateway, input=[*made["output"], {"role": "user", "content": "x"}]))[1]
    listed = (await ask(gateway, "GET", f"/v1/responses/{second['id']}/input_items?order=asc"))[1]["data"]
    assert listed[0]["content"][0]["text"] == "Hm, ünïcode\n" and "encrypted_content" not in listed[0]


@pytest.mark.parametrize(
    "value",
    [
        "x", "", "gAAAAABo-another-server", "pelton1.", "pelton1.AAAA", "pelton1.\u00fc", "pelton1.=" + "A" * 40,
        "pelton1." + base64.urlsafe_b64encode(bytes(40)).decode(), 7,
    ],
)  # fmt: skip
async def test_invalid_encrypted_reasoning_is_refused(gateway, value):
    item = {"type": "reasoning", "summary": [], "encrypted_content": value}
    status, body = await create(gateway, input=[item, {"role": "user", "content": "x"}])
    assert status == 400 and body["error"]["param"] == "input[0].encrypted_content"
    whole = isinstance(value, str) and value
    assert body["error"]["code"] == ("invalid_encrypted_content" if whole else "invalid_type")


async def test_altered_encrypted_reasoning_is_refused(gateway):
    gateway.generator.script = lambda _: THINKING
    packed = (await create(gateway, include=PACKED))[1]["output"][0]["encrypted_content"]
    for wrong in (packed[:-4], packed + "AAAA", packed[:10] + ("A" if packed[10] != "A" else "B") + packed[11:]):
        item = {"type": "reasoning", "summary": [], "encrypted_content": wrong}
        assert (await create(gateway, input=[item, {"role": "user", "content": "x"}]))[0] == 400


async def test_items_are_referenced(gateway):
    first = (await create(gateway, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]))[1]
    listed = (await ask(gateway, "GET", f"/v1/responses/{first['id']}/input_items?order=asc"))[1]["data"]
    references = [
        {"type": "item_reference", "id": listed[1]["id"]},
        {"id": first["output"][0]["id"]},
        {"id": listed[0]["id"], "type": None},
    ]
    status, body = await create(gateway, input=[*references, {"role": "user", "content": "three"}])
    assert status == 200, body
    assert [message["content"] for message in said(gateway)] == ["two", "Hello", "one", "three"]
    # A referenced item becomes input of the new response: it can be listed and referenced again.
    kept = (await ask(gateway, "GET", f"/v1/responses/{body['id']}/input_items?order=asc"))[1]["data"]
    assert [item["id"] for item in kept[:3]] == [reference["id"] for reference in references]
    assert (await ask(gateway, "DELETE", f"/v1/responses/{first['id']}"))[0] == 200
    assert (await create(gateway, input=[references[0]]))[0] == 200
    assert (await ask(gateway, "DELETE", f"/v1/responses/{body['id']}"))[0] == 200
    third = (await create(gateway))[1]
    assert (await ask(gateway, "DELETE", f"/v1/responses/{third['id']}"))[0] == 200
    status, body = await create(gateway, input=[{"role": "user", "content": "x"}, {"id": third["output"][0]["id"]}])
    assert (status, body["error"]["param"], body["error"]["code"]) == (404, "input[1].id", "item_not_found")


async def test_tokens_of_references_are_counted(gateway):
    made = (await create(gateway))[1]["output"][0]["id"]
    fields = {"input": [{"id": made}, {"role": "user", "content": "x"}]}
    status, body, _ = await gateway.post("/v1/responses/input_tokens", {"model": MODEL, **fields})
    assert status == 200
    assert body["input_tokens"] == (await create(gateway, **fields))[1]["usage"]["input_tokens"]


async def test_a_prompt_that_is_too_long_is_counted(gateway):
    """The token count is returned, because clients need it to shorten the prompt; running it would be refused."""
    turns = [{"role": "user", "content": letter * 3000} for letter in "abc"]
    for asked, num_tokens in (("x" * 9000, 9000), (turns, 9000)):
        fields = {"model": MODEL, "input": asked}
        status, body, _ = await gateway.post("/v1/responses/input_tokens", fields)
        assert status == 200 and body["input_tokens"] >= num_tokens, body
        assert (await gateway.post("/v1/responses", fields))[1]["error"]["code"] == "context_length_exceeded"
    # The count after dropping turns; if even the last turn does not fit, the count of the last turn.
    for asked, low, high in ((turns, 3000, 4096), ([*turns, {"role": "user", "content": "d" * 5000}], 5000, 6000)):
        fields = {"model": MODEL, "input": asked, "truncation": "auto"}
        status, body, _ = await gateway.post("/v1/responses/input_tokens", fields)
        assert status == 200 and low < body["input_tokens"] < high, body
    status, body, _ = await gateway.post("/v1/responses/input_tokens", {"model": MODEL, "input": "x" * 3_000_000})
    assert status == 413, body


async def test_counting_errors_name_the_fields_of_the_request(gateway):
    orphan = {"type": "function_call_output", "call_id": "c", "output": "1"}
    fields = {"model": MODEL, "input": [{"role": "user", "content": "x" * 9000}, orphan]}
    for more in ({}, {"truncation": "auto"}):
        status, body, _ = await gateway.post("/v1/responses/input_tokens", {**fields, **more})
        assert (status, body["error"]["param"]) == (400, "input[1].call_id"), body


async def test_an_item_is_referenced_once(gateway):
    made = (await create(gateway))[1]["output"][0]["id"]
    status, body = await create(gateway, input=[{"id": made}] * 2)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "input[1].id", "duplicate_item")


async def test_items_are_private_to_their_key():
    async with run_gateway(keys=True) as gateway:
        gateway.headers["Authorization"] = f"Bearer {USER_KEY}"
        mine = {"id": "msg_mine", "role": "user", "content": "secret"}
        made = (await create(gateway, input=[mine]))[1]["output"][0]["id"]
        for identifier in (made, "msg_mine"):
            body = {"model": MODEL, "input": [{"id": identifier}]}
            other = {"Authorization": f"Bearer {OTHER_KEY}"}
            assert (await gateway.post("/v1/responses", body, **other))[0] == 404
            assert (await gateway.post("/v1/responses", body))[0] == 200
        own = {"id": "msg_mine", "role": "user", "content": "other"}
        assert (await gateway.post("/v1/responses", {"model": MODEL, "input": [own]}, **other))[0] == 200
        assert (await gateway.post("/v1/responses", {"model": MODEL, "input": [{"id": "msg_mine"}]}))[0] == 200
        assert said(gateway)[0]["content"] == "secret"


async def test_unstored_items_cannot_be_referenced(gateway):
    made = (await create(gateway, store=False))[1]["output"][0]["id"]
    assert (await create(gateway, input=[{"id": made}]))[0] == 404


@pytest.fixture
async def calling():
    async with run_gateway() as running:
        running.models.entry.formats = ModelFormats(template=SUPPORT, tools=TOOL_FORMATS["hermes"])
        yield running


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": parameters, **fields}


async def test_tools_are_strict_where_their_schemas_can_be(calling):
    tools = [
        tool("fits", STRICT),
        tool("fits_null", STRICT, strict=None),
        tool("not_asked", STRICT, strict=False),
        tool("optional", {**STRICT, "required": []}),
        tool("open", {"type": "object", "properties": {}}),
        tool("none", None),
    ]
    status, body = await create(calling, tools=tools)
    assert status == 200, body
    assert [one["strict"] for one in body["tools"]] == [True, True, False, False, False, False]
    grammar = calling.generator.requests[-1].grammar
    assert grammar and '"a"' in grammar


async def test_unsupported_schemas_are_enforced_only_on_request(calling):
    looks_ahead = {**STRICT, "properties": {"a": {"type": "string", "pattern": "^(?=x)x$"}}}
    status, body = await create(calling, tools=[tool("f", looks_ahead), tool("g", STRICT, strict=True)])
    assert status == 200, body
    assert [one["strict"] for one in body["tools"]] == [False, True]
    status, body = await create(calling, tools=[tool("f", looks_ahead, strict=True)])
    assert status == 400 and body["error"]["param"] == "tools[0].parameters"
