"""The outbox: merging, waking, and patience with a slow consumer."""

from __future__ import annotations

import asyncio

import pytest

from gateway.flow.events import TextDelta
from gateway.flow.outbox import FULL_AT_TOKENS, Outbox
from gateway.text.message_parser import ToolCallDelta
from shared.messages import TokenLogprobs


def never() -> None:
    pytest.fail("the consumer was not slow")


async def test_deltas_of_a_choice_are_merged_and_choices_are_not() -> None:
    outbox = Outbox(10, never)
    entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in (1, 2)]
    outbox.put(TextDelta(1, "a", [1], entries[:1], None, 7, entries))
    outbox.put(TextDelta(0, "x", [5]))
    outbox.put(TextDelta(1, "b", [2], entries[1:], "stop"))
    assert outbox.take() == TextDelta(1, "ab", [1, 2], entries, "stop", 7, entries)
    assert outbox.take() == TextDelta(0, "x", [5])
    assert outbox.take() is None


async def test_ids_without_text_wait_for_their_text() -> None:
    outbox = Outbox(10, never)
    outbox.put(TextDelta(0, "", [1]))
    assert outbox.take() is None
    outbox.put(TextDelta(0, "🛑", [2]))
    assert outbox.take() == TextDelta(0, "🛑", [1, 2])
    outbox.put(TextDelta(0, "", [3]))
    outbox.put(TextDelta(0, "", [], None, "length"))
    assert outbox.take() == TextDelta(0, "", [3], None, "length")


async def test_reasoning_and_calls_are_worth_delivering() -> None:
    outbox = Outbox(10, never)
    for news in (
        TextDelta(0, "", [1], reasoning="Hm"),
        TextDelta(0, "", [2], tool_calls=[ToolCallDelta(0, id="c", name="f")]),
        TextDelta(0, "", [3], tool_calls=[ToolCallDelta(0, "{")], num_reasoning_tokens=1),
    ):
        outbox.put(news)
        assert outbox.take() == news
    outbox.put(TextDelta(0, "", [4], num_reasoning_tokens=1))
    assert outbox.take() is None
    outbox.put(TextDelta(0, "", [5], reasoning="m", num_reasoning_tokens=1))
    assert outbox.take() == TextDelta(0, "", [4, 5], reasoning="m", num_reasoning_tokens=2)


async def test_what_was_taken_is_not_changed_by_what_follows() -> None:
    outbox = Outbox(10, never)
    ids = [1]
    outbox.put(TextDelta(0, "a", ids))
    outbox.put(TextDelta(0, "b", [2]))
    taken = outbox.take()
    outbox.put(TextDelta(0, "c", [3]))
    assert taken == TextDelta(0, "ab", [1, 2])
    assert ids == [1]


async def test_a_waiting_consumer_is_woken() -> None:
    outbox = Outbox(10, never)
    waiting = outbox.news()
    outbox.put(TextDelta(0, "", [1]))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(TextDelta(0, "a", [2]))
    await asyncio.wait_for(waiting, 5)


async def test_a_full_outbox_is_reported_once_unless_something_is_taken() -> None:
    reports: list[int] = []
    outbox = Outbox(0.05, lambda: reports.append(1))
    outbox.put(TextDelta(0, "a", [1] * FULL_AT_TOKENS))
    assert outbox.take() is not None
    await asyncio.sleep(0.1)
    assert reports == []
    outbox.put(TextDelta(0, "a", [1] * FULL_AT_TOKENS))
    for _ in range(4):
        outbox.put(TextDelta(0, "a", [1]))
        await asyncio.sleep(0.05)
    assert reports == [1]
    outbox.close()
