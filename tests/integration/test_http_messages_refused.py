"""/v1/messages: refused requests, with the error types and the shape of Anthropic's API."""

from __future__ import annotations

import pytest

from gateway.text.formats import ModelFormats
from shared.errors import InternalError, RateLimitError, UnavailableError
from tests.fakes.fake_generator import SUPPORT
from tests.integration.test_http_messages import BASE, CALLED, FORMATS, RESULT, TOOL, ask, text, user


@pytest.fixture
async def gateway(gateway):
    plain, gateway.models.entry.formats = gateway.models.entry.formats, FORMATS
    yield gateway
    # After every case the next request is served.
    gateway.models.entry.formats = plain
    assert (await ask(gateway))[0] == 200


BLOCK = "messages[0].content[0]"
ONE_CALL = {"disable_parallel_tool_use": True}
SCHEMA = {"type": "json_schema", "schema": {}}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "x"}
REFERENCE = {"type": "tool_reference", "tool_name": "nobody"}


def said(*blocks):
    return {"messages": [user(*blocks)]}


def document(source, **more):
    return said({"type": "document", "source": source, **more})


def result(**changes):
    return {"messages": [*BASE["messages"], CALLED, user({**RESULT, **changes})]}


def calling(**changes):
    block = {"type": "tool_use", "id": "a", "name": "x", "input": {}, **changes}
    return {"messages": [{"role": "assistant", "content": [block]}]}


def edits(*entries):
    return {"context_management": {"edits": list(entries)}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"messages": [user("x")]}, BLOCK),
        (said({"type": "image", "source": {}}), f"{BLOCK}.type"),
        (document({}), f"{BLOCK}.source.type"),
        (said({"type": "document"}), f"{BLOCK}.source"),
        (document({"type": "base64", "media_type": "application/pdf", "data": ""}), "text only"),
        (document({"type": "text", "media_type": "text/html", "data": ""}), "source.media_type"),
        (document({"type": "text", "media_type": "text/plain"}), f"{BLOCK}.source.data"),
        (document({"type": "content", "content": [{"type": "image"}]}), "source.content[0].type"),
        (document({"type": "content", "content": 5}), f"{BLOCK}.source.content"),
        (document(PLAIN, citations={"enabled": True}), f"{BLOCK}.citations"),
        (said({"type": "search_result", "title": "x", "content": []}), f"{BLOCK}.source"),
        ({"messages": [{**BASE["messages"][0], "clear_at": "never"}]}, "messages[0].clear_at"),
        ({"messages": [{"role": "system", "content": "x", "clear_at": "later"}]}, "messages[0].clear_at"),
        (result(content=[REFERENCE]), "[0].tool_name"),
        (said({"type": ["text"]}), f"{BLOCK}.type"),
        (said({"text": "x"}), f"{BLOCK}.type"),
        (said({"type": "tool_use", "id": "a", "name": "b", "input": {}}), f"{BLOCK}.type"),
        (said({"type": "text"}), f"{BLOCK}.text"),
        (said(text("x", extra=1)), f"{BLOCK}.extra"),
        (said(text("x", cache_control={"type": "forever"})), f"{BLOCK}.cache_control.type"),
        (said(text("x", cache_control={"type": "ephemeral", "ttl": "1d"})), f"{BLOCK}.cache_control.ttl"),
        (said(text("x", citations=[{}])), f"{BLOCK}.citations"),
        (said(RESULT), f"{BLOCK}.tool_use_id"),
        ({"messages": [*BASE["messages"], CALLED, user(text("x"), RESULT)]}, "messages[2].content[1]"),
        (result(content=[{"type": "image"}]), "messages[2].content[0].content[0].type"),
        (result(is_error=1), "messages[2].content[0].is_error"),
        ({"messages": [*BASE["messages"], CALLED]}, "messages[1]"),
        ({"messages": [*BASE["messages"], {"role": "assistant", "content": ""}]}, "messages[1]"),
        (calling(id=""), f"{BLOCK}.id"),
        (calling(input=[]), f"{BLOCK}.input"),
        (said({"type": "redacted_thinking", "data": ""}), f"{BLOCK}.type"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [text(5)]}, "system[0].text"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"model": 5}, "model"),
        ({"temperature": 1.01}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"metadata": {"user_id": "x" * 257}}, "metadata.user_id"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]}, "tools[0].type"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "objekt"}}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{**TOOL, "input_examples": [1]}]}, "tools[0].input_examples"),
        ({"tools": [{**TOOL, "eager_input_streaming": False}]}, "tools[0].eager_input_streaming"),
        ({"tools": [{**TOOL, "unknown": 1}]}, "tools[0].unknown"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", **ONE_CALL}}, "tool_choice.disable_parallel_tool_use"),
        ({"tools": [TOOL], "tool_choice": {"type": "none", **ONE_CALL}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type between_tools is not supported here: "),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 3000}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3000}, "max_tokens": 3000}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "x"}}}, "block_binding"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {**SCHEMA, "schema": {"type": "intt"}}}}, "output_config.format.schema"),
        ({"cache_control": {"type": "never"}}, "cache_control.type"),
        ({"context_management": []}, "context_management"),
        (edits({"type": "clear_tool_uses_20250919"}), "context_management.edits[0].type"),
        (edits({"type": "clear_thinking_20251015", "keep": "some"}), "context_management.edits[0].keep"),
        (edits({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}), "edits[0].keep.value"),
        (edits({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}), "keep.value"),
        (edits({"type": "clear_thinking_20251015"}, {"type": "clear_thinking_20251015"}), "context_management.edits"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"output_format": {"type": "xml", "schema": {}}}, "output_format.type"),
        ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "output_format"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_refused_fields_are_named(gateway, fields, named):
    for stream in (False, True):
        status, body = await ask(gateway, **{"stream": stream, **fields})
        assert status == 400 and set(body) == {"type", "error", "request_id"} and body["type"] == "error", body
        assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == "invalid_request_error"
        message = body["error"]["message"]
        assert named in message and body["request_id"].startswith("req_"), message
        # Field names of the chat API would mislead the client.
        assert not any(name in message for name in ("function", "continue_final", "reasoning_", "parallel_tool_calls"))
    assert not gateway.generator.requests


async def test_threads_are_refused_with_their_own_code(gateway):
    status, body = await ask(gateway, thread={"type": "create"})
    assert status == 400 and "thread" in body["error"]["message"]
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_a_model_without_reasoning(gateway):
    gateway.models.entry.formats = ModelFormats(template=SUPPORT)
    for fields, named in (
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, "thinking.budget_tokens"),
        ({"tools": [TOOL]}, "tools"),
    ):
        status, body = await ask(gateway, **fields)
        assert status == 400 and named in body["error"]["message"]
    assert (await ask(gateway, thinking={"type": "disabled"}))[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"max_tokens": NaN}', b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
async def test_invalid_bodies_are_refused(gateway, body):
    status, answer, headers = await gateway.post("/v1/messages", body)
    assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert headers["request-id"] == headers["x-request-id"] == answer["request_id"]


async def test_other_failures_have_anthropics_shape(gateway):
    async def failing(error):
        gateway.generator.submit_error = error
        status, body, headers = await gateway.post("/v1/messages", BASE)
        gateway.generator.submit_error = None
        return status, body["error"]["type"], headers

    status, kind, headers = await failing(RateLimitError("Busy.", retry_after=2.5))
    assert (status, kind, headers["Retry-After"]) == (429, "rate_limit_error", "3")
    status, kind, headers = await failing(UnavailableError("No worker."))
    assert (status, kind, headers["Retry-After"]) == (529, "overloaded_error", "1")
    assert (await failing(InternalError("Bug.")))[:2] == (500, "api_error")
    assert (await failing(ZeroDivisionError()))[:2] == (500, "api_error")
    status, body, _ = await gateway.post("/v1/messages", b" " * 2_000_000)
    assert (status, body["error"]["type"]) == (413, "request_too_large")
    status, body, _ = await gateway.post("/v1/messages", BASE, **{"Content-Type": "text/plain"})
    assert (status, body["error"]["type"]) == (415, "invalid_request_error")
    status, body, _ = await gateway.post("/v1/messages/nothing", BASE)
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    # OpenAI paths keep OpenAI's error shape.
    status, body, headers = await gateway.post("/v1/messagesx", BASE)
    assert status == 404 and set(body) == {"error"} and "request-id" not in headers
