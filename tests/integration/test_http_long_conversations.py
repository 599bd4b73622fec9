"""Conversations of many messages are examined in a thread, not on the event loop."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.common import messages
from gateway.api.responses import input as response_input
from gateway.api.responses import routes as responses
from tests.fakes.http_gateway import Gateway, run_gateway
from tests.integration.test_http_responses import ask, create

LOOKED_AT = (
    (messages, "check_messages"),
    (messages, "conversation"),
    (response_input, "input_items"),
    (response_input, "load_items"),
    (responses, "load_items"),
    (responses, "stored_items"),
)


@pytest.fixture
def on_loop(monkeypatch):
    """Record for each function whether it was called on the event loop's thread."""
    calls: dict[str, list[bool]] = defaultdict(list)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name].append(threading.current_thread() is threading.main_thread())
            return function(*args)

        return call

    for module, name in LOOKED_AT:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return calls


def conversation_of(num_turns: int) -> list[dict[str, str]]:
    said = [{"role": role, "content": "Well."} for _ in range(num_turns) for role in ("user", "assistant")]
    return [*said, {"role": "user", "content": "And?"}]


async def all_routes(gateway: Gateway, num_turns: int) -> None:
    said = conversation_of(num_turns)
    status, first = await create(gateway, input=said)
    assert status == 200, first
    assert (await create(gateway, previous_response_id=first["id"]))[0] == 200
    status, items = await ask(gateway, "GET", f"/v1/responses/{first['id']}/input_items?limit=100")
    assert status == 200 and items["data"][0]["content"][0]["text"] == "And?"
    assert (await gateway.post("/v1/responses/input_tokens", {"model": "fake-model", "input": said}))[0] == 200
    assert (await gateway.chat(messages=said))[0] == 200
    assert (await gateway.post("/tokenize", {"messages": said}))[0] == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": "Well."}] * (2 * num_turns)}]
    assert (await gateway.chat(messages=parts))[0] == 200


async def test_long_conversations_are_examined_in_threads(on_loop):
    async with run_gateway() as gateway:
        await all_routes(gateway, 100)
        assert [len(said) for said in gateway.models.entry.pipeline.messages] == [201, 203, 201, 201, 201, 1]
    assert set(on_loop) == {name for _, name in LOOKED_AT}
    # One item is cheap to examine: `input` as a string, and the outputs of two responses.
    assert {name: sum(calls) for name, calls in on_loop.items() if any(calls)} == {"input_items": 1, "stored_items": 3}


async def test_short_conversations_are_examined_on_the_loop(on_loop):
    async with run_gateway() as gateway:
        await all_routes(gateway, 2)
    assert all(all(calls) for calls in on_loop.values())
