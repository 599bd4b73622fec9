"""Work on large client data runs in a thread."""

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
def test_objects_and_text_are_counted(messages: list[Any], many: bool) -> None:
    assert (count_objects(messages) > MANY) is many


async def test_only_large_work_runs_in_a_thread() -> None:
    here = threading.get_ident()
    assert await run_in_thread_if_large(MANY, threading.get_ident) == here
    assert await run_in_thread_if_large(MANY + 1, threading.get_ident) != here
