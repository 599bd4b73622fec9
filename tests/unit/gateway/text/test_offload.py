"""What is counted before it is decided where a conversation is looked at."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gateway.text.offload import MANY, count_objects, run_in_thread_if_large

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "many"),
    [
        ([{"role": "user", "content": "hi"}] * MANY, False),
        ([{"role": "user", "content": "hi"}] * (MANY + 1), True),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}] * MANY}], True),
        ([{"role": "assistant", "tool_calls": [CALL] * 4}], False),
        ([{"role": "assistant", "tool_calls": [CALL | {"function": {"arguments": "[" + "1," * 300_000}}]}], True),
        ([{"type": "function_call", "arguments": "x" * 1_000_000}], True),
        (["not", None, 1, {"content": [None]}], False),
    ],
)
def test_large_conversations_are_many(messages: list[Any], many: bool) -> None:
    assert (count_objects(messages) > MANY) is many


async def test_many_are_looked_at_in_a_thread() -> None:
    here = threading.get_ident()
    assert await run_in_thread_if_large(MANY, threading.get_ident) == here != await run_in_thread_if_large(MANY + 1, threading.get_ident)
