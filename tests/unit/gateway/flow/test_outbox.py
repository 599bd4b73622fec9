"""The outbox: merging, waking, and the timeout of a slow consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from gateway.flow.events import TextDelta
from gateway.flow.outbox import FULL_AT_TOKENS, FlushScheduler, Outbox
from gateway.text.message_parser import ToolCallDelta
from shared.messages import DraftCounts, TokenLogprobs


def never() -> None:
    pytest.fail("the consumer was not slow")


@pytest.fixture
async def outbox() -> Outbox:
    return Outbox(10, never, FlushScheduler())


async def test_deltas_of_a_choice_are_merged_and_choices_are_not(outbox: Outbox) -> None:
    entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in (1, 2)]
    outbox.put(TextDelta(1, "a", [1], entries[:1], None, 7, entries))
    outbox.put(TextDelta(0, "x", [5]))
    outbox.put(TextDelta(1, "b", [2], entries[1:], "stop", drafts=DraftCounts(1, 2)))
    assert outbox.take() == TextDelta(1, "ab", [1, 2], entries, "stop", 7, entries, drafts=DraftCounts(1, 2))
    assert outbox.take() == TextDelta(0, "x", [5])
    assert outbox.take() is None


async def test_ids_without_text_wait_for_their_text(outbox: Outbox) -> None:
    outbox.put(TextDelta(0, "", [1]))
    assert outbox.take() is None
    outbox.put(TextDelta(0, "🛑", [2]))
    assert outbox.take() == TextDelta(0, "🛑", [1, 2])
    outbox.put(TextDelta(0, "", [3]))
    outbox.put(TextDelta(0, "", [], None, "length"))
    assert outbox.take() == TextDelta(0, "", [3], None, "length")


async def test_reasoning_and_calls_are_worth_delivering(outbox: Outbox) -> None:
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


async def test_what_was_taken_is_not_changed_by_what_follows(outbox: Outbox) -> None:
    ids = [1]
    outbox.put(TextDelta(0, "a", ids))
    outbox.put(TextDelta(0, "b", [2]))
    taken = outbox.take()
    outbox.put(TextDelta(0, "c", [3]))
    assert taken == TextDelta(0, "ab", [1, 2])
    assert ids == [1]


async def test_a_waiting_consumer_is_woken(outbox: Outbox) -> None:
    waiting = outbox.news()
    outbox.put(TextDelta(0, "", [1]))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(TextDelta(0, "a", [2]))
    await asyncio.wait_for(waiting, 5)


async def test_a_full_outbox_is_reported_once_unless_something_is_taken() -> None:
    reports: list[int] = []
    outbox = Outbox(0.05, lambda: reports.append(1), FlushScheduler())
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


class Taker:
    """Receiver that records deltas, and the waiting consumer task.

    Attributes:
        passed, taken: deltas that the receiver, and the task, got.
        log: both, in order.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.is_ready = True
        self.error: Exception | None = None
        self.passed: list[TextDelta] = []
        self.taken: list[TextDelta] = []
        self.log: list[TextDelta] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        outbox.receiver = self
        self.task = asyncio.create_task(self.consume())

    def ready(self) -> bool:
        return self.is_ready

    def receive(self, deltas: Sequence[TextDelta]) -> None:
        if self.error is not None:
            raise self.error
        self.passed += deltas
        self.log += deltas

    async def consume(self) -> None:
        while True:
            while (delta := self.outbox.take()) is not None:
                self.taken.append(delta)
                self.log.append(delta)
                await self.may_go_on.wait()
            await self.outbox.news()


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
async def taker(outbox: Outbox) -> AsyncIterator[Taker]:
    taker = Taker(outbox)
    yield taker
    taker.task.cancel()


async def test_a_receiver_gets_deltas_while_the_consumer_waits(outbox: Outbox, taker: Taker) -> None:
    await turns()
    outbox.put(TextDelta(0, "a", [1]))
    assert taker.log == []
    await turns()
    outbox.put(TextDelta(0, "b", [2]))
    outbox.put(TextDelta(1, "x", [7]))
    outbox.put(TextDelta(0, "c", [3]))
    await turns()
    assert taker.passed == [TextDelta(0, "a", [1]), TextDelta(0, "bc", [2, 3]), TextDelta(1, "x", [7])]
    assert taker.taken == []


async def test_ends_and_reports_on_prompts_are_the_consumers(outbox: Outbox, taker: Taker) -> None:
    await turns()
    report = TextDelta(0, "a", [1], prompt_logprobs=[TokenLogprobs(1, None, 1, [], [])])
    outbox.put(report)
    await turns()
    outbox.put(TextDelta(0, "b", [2]))
    outbox.put(TextDelta(0, "c", [3], None, "stop"))
    await turns()
    assert taker.taken == [report, TextDelta(0, "bc", [2, 3], None, "stop")]
    assert taker.passed == []


async def test_a_receiver_that_is_not_ready_leaves_deltas_to_the_consumer(outbox: Outbox, taker: Taker) -> None:
    taker.is_ready = False
    taker.may_go_on.clear()
    await turns()
    outbox.put(TextDelta(0, "a", [1]))
    await turns()
    taker.is_ready = True
    # The consumer is busy: later deltas must not overtake it.
    outbox.put(TextDelta(0, "b", [2]))
    await turns()
    assert taker.log == [TextDelta(0, "a", [1])]
    taker.may_go_on.set()
    await turns()
    outbox.put(TextDelta(0, "c", [3]))
    await turns()
    assert [delta.text for delta in taker.taken] == ["a", "b"]
    assert [delta.text for delta in taker.passed] == ["c"]


async def test_what_a_receiver_raises_is_raised_to_the_consumer(outbox: Outbox, taker: Taker) -> None:
    taker.error = KeyError("of the receiver")
    await turns()
    outbox.put(TextDelta(0, "a", [1]))
    with pytest.raises(KeyError, match="of the receiver"):
        await asyncio.wait_for(taker.task, 5)


async def test_nothing_is_handed_over_past_a_consumer_that_was_cancelled(outbox: Outbox, taker: Taker) -> None:
    await turns()
    taker.task.cancel()
    outbox.put(TextDelta(0, "a", [1]))
    await turns()
    outbox.put(TextDelta(0, "b", [2]))
    await turns()
    assert taker.log == []
