"""/v1/messages: the messages that the model receives for an agent's history and tools."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import pytest

from gateway.api.anthropic import routes as routes_messages
from gateway.api.anthropic.chat import chat_of_conversation
from gateway.api.anthropic.fields import ConversationFields, parse_body
from gateway.api.common.messages import MAX_MESSAGES
from gateway.flow.events import TextDelta
from gateway.http.body import LARGE
from tests.fakes.fake_generator import MODEL, FakeEntry, FakeGenerator, FakeModels
from tests.fakes.http_gateway import parse_named_events, run_gateway
from tests.integration.test_http_messages import BASE, CALLED, FORMATS, TOOL, ask, message_of, text, user

BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
KEEP = {"type": "clear_thinking_20251015"}


@pytest.fixture
def gateway(gateway):
    gateway.models.entry.formats = FORMATS
    return gateway


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def thinking(thought, signature="s"):
    return {"type": "thinking", "thinking": thought, "signature": signature}


async def shown(gateway, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages passed to the template: role, content, reasoning."""
    status, body = await ask(gateway, **fields)
    assert status == 200, body
    return [
        {"role": one["role"], "content": one["content"], "thought": one.get("reasoning_content")}
        for one in gateway.models.entry.pipeline.messages[-1]
    ]


async def test_documents_and_search_results_are_text(gateway):
    source = {"type": "text", "media_type": "text/plain", "data": "One\ntwo."}
    found = {"type": "search_result", "source": "https://example.com", "title": "T", "content": [text("a"), text("b")]}
    parts = {"type": "content", "content": [text("x"), text("y", cache_control={"type": "ephemeral"})]}
    said = await shown(
        gateway,
        messages=[
            user(
                text("Read:"),
                {"type": "document", "source": source, "title": "Title", "context": "Old", "citations": None},
                {"type": "document", "source": parts, "citations": {"enabled": False}},
                {"type": "document", "source": {"type": "content", "content": "z"}, "title": None},
            ),
            CALLED,
            user({**RESULT, "is_error": False, "content": [{**found, "citations": {"enabled": False}}, text("end")]}),
        ],
    )
    assert said[0]["content"] == (
        "Read:\n"
        "<document>\n<title>Title</title>\n<context>Old</context>\n<content>\nOne\ntwo.\n</content>\n</document>\n"
        "<document>\n<content>\nx\ny\n</content>\n</document>\n"
        "<document>\n<content>\nz\n</content>\n</document>"
    )
    assert said[2]["content"] == (
        "<search_result>\n<source>https://example.com</source>\n<title>T</title>\n<content>\na\nb\n</content>\n"
        "</search_result>\nend"
    )


async def test_blocks_of_other_servers_are_left_out(gateway):
    said = await shown(
        gateway,
        messages=[
            user(text("a")),
            assistant(
                {"type": "redacted_thinking", "data": "opaque"},
                thinking("", "from elsewhere"),
                text("b", citations=[{"type": "char_location", "cited_text": "c"}]),
                {"type": "fallback", "from": {"model": "x"}, "to": {"model": "y"}},
            ),
            user(text("d")),
            assistant({"type": "redacted_thinking", "data": "opaque"}),
            user(text("e")),
        ],
    )
    assert [one["content"] for one in said] == ["a", "b", "d", "", "e"]
    assert not any(one["thought"] for one in said)
    # Positions refer to the client's list.
    broken = assistant({"type": "redacted_thinking", "data": "x"}, {"type": "image"})
    _, body = await ask(gateway, messages=[user(text("a")), broken])
    assert "messages[1].content[1].type" in body["error"]["message"]


async def test_system_messages_may_be_temporary(gateway):
    passing = {"role": "system", "content": "Now.", "clear_at": "next_user_message"}
    stays = {"role": "system", "content": [text("Always.")], "clear_at": "never"}
    said = await shown(gateway, messages=[user(text("a")), passing, stays, user(text("b")), passing])
    assert [one["content"] for one in said] == ["a", "Always.", "b", "Now."]
    said = await shown(gateway, messages=[user(text("a")), passing, user(text("b"))])
    assert [one["content"] for one in said] == ["a\nb"]


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        (None, ["one", "two", "three"]),
        ({}, ["one", "two", "three"]),
        ({"edits": []}, ["one", "two", "three"]),
        ({"edits": [{**KEEP, "keep": "all"}]}, ["one", "two", "three"]),
        ({"edits": [{**KEEP, "keep": {"type": "all"}}]}, ["one", "two", "three"]),
        # A round of calls is one turn.
        ({"edits": [KEEP]}, [None, "two", "three"]),
        ({"edits": [{**KEEP, "keep": {"type": "thinking_turns", "value": 1}}]}, [None, "two", "three"]),
        ({"edits": [{**KEEP, "keep": {"type": "thinking_turns", "value": 2}}]}, ["one", "two", "three"]),
    ],
)
async def test_former_thinking_is_cleared(gateway, edit, kept):
    messages = [
        user(text("a")),
        assistant(thinking("one"), text("A")),
        user(text("b")),
        assistant(thinking("two"), *CALLED["content"]),
        user(RESULT),
        assistant(thinking("three"), text("B")),
    ]
    said = await shown(gateway, messages=messages, context_management=edit)
    assert [one["thought"] for one in said if one["role"] == "assistant"] == kept
    body = {"model": MODEL, "messages": messages, "context_management": edit}
    assert (await gateway.post("/v1/messages/count_tokens", body))[0] == 200


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([text(BILLING), text("You are."), text(BILLING)], f"You are.\n{BILLING}"),
        ([text(f"{BILLING}\nYou are.")], "You are."),
        (f"{BILLING}\nYou are.", "You are."),
        ([text(BILLING)], None),
        (BILLING, None),
        (f"You are.\n{BILLING}", f"You are.\n{BILLING}"),
        ([], None),
    ],
)
async def test_the_billing_line_is_removed(gateway, system, kept):
    said = await shown(gateway, system=system)
    assert [one["content"] for one in said if one["role"] == "system"] == ([kept] if kept else [])


async def test_deferred_tools_are_loaded_by_reference(gateway):
    deferred = {"name": "paint", "input_schema": {"type": "object", "properties": {"xyzzy": {}}}, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "paint"}
    found = [*BASE["messages"], CALLED, user({**RESULT, "content": [reference]})]
    choice = {"tools": [TOOL, deferred], "tool_choice": {"type": "any"}}
    assert (await ask(gateway, **choice))[0] == 200
    assert "xyzzy" not in gateway.generator.requests[-1].grammar
    said = await shown(gateway, messages=found, **choice)
    assert said[-1]["content"] == "The tool paint is available now."
    assert "xyzzy" in gateway.generator.requests[-1].grammar
    # The position of an error refers to the client's list.
    for wrong in ({"input_schema": {"type": "no"}}, {"name": "no name", "input_schema": {}}, {"name": TOOL["name"]}):
        status, body = await ask(gateway, tools=[deferred, TOOL, {**TOOL, "name": "last", **wrong}])
        assert status == 400 and body["error"]["message"].startswith("tools[2]."), body


def test_examples_follow_the_description():
    tools = [
        {**TOOL, "input_examples": [{"a": "\u00e9"}, {"b": 1}]},
        {"name": "x", "input_schema": {}, "input_examples": [{}]},
        {"name": "y", "input_schema": {}, "input_examples": []},
    ]
    fields = parse_body({"model": MODEL, "messages": BASE["messages"], "tools": tools}, ConversationFields, [])
    chat = chat_of_conversation(fields, FakeEntry())
    assert [tool.function.description for tool in chat.tools] == [
        'Looks.\n\nExamples of input:\n{"a": "\u00e9"}\n{"b": 1}',
        "Examples of input:\n{}",
        None,
    ]


async def test_omitted_thinking_is_passed_back_to_the_model():
    script = [TextDelta(0, "", [1], reasoning=piece) for piece in ("Hm, ", "\u00e9.")]
    script.append(TextDelta(0, "Yes.", [2], finish_reason="stop"))
    models = FakeModels(FakeEntry(formats=FORMATS))
    async with run_gateway(FakeGenerator(lambda _: script), models) as gateway:
        fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
        _, whole = await ask(gateway, **fields)
        streamed = message_of(parse_named_events(await gateway.stream_raw("/v1/messages", {**BASE, **fields})))
        assert streamed["content"] == whole["content"]
        hidden, said = whole["content"]
        assert hidden["thinking"] == "" and hidden["signature"] and said["text"] == "Yes."
        assert "Hm" not in json.dumps(whole)
        for signature, thought in (
            (hidden["signature"], "Hm, \u00e9."),
            (hidden["signature"][:-4], None),
            (base64.b64encode(b"elsewhere").decode(), None),
            ("", None),
        ):
            messages = [user(text("a")), assistant({**hidden, "signature": signature}, said), user(text("b"))]
            assert (await shown(gateway, messages=messages))[1]["thought"] == thought


async def test_too_many_messages_are_too_long(gateway):
    status, body = await ask(gateway, messages=[user(text("a")), assistant(text("b"))] * (MAX_MESSAGES // 2 + 1))
    assert status == 400 and f"messages has {MAX_MESSAGES + 2} entries" in body["error"]["message"]


@pytest.mark.parametrize("route", ["", "/count_tokens"])
async def test_large_bodies_are_converted_in_a_thread(gateway, monkeypatch, route):
    name = "chat_of_conversation" if route else "chat_of_messages"
    original, threads = getattr(routes_messages, name), []

    def spied(fields, entry):
        threads.append(threading.get_ident())
        return original(fields, entry)

    monkeypatch.setattr(routes_messages, name, spied)
    for size in (1, LARGE):
        left_out = {"type": "redacted_thinking", "data": "x" * size}
        body = {**BASE, "messages": [user(text("a")), assistant(left_out, text("b")), user(text("c"))]}
        if route:
            del body["max_tokens"]
        assert (await gateway.post("/v1/messages" + route, body))[0] == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
