"""Bounded queue of deltas between a generation and its route.

A callback of the event loop takes most deltas, because waking a task for each token would cost more than all other
work on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from gateway.flow.events import TextDelta
from gateway.text.message_parser import ToolCallDelta

_T = TypeVar("_T")

FULL_AT_TOKENS = 256
"""Number of tokens from which on the consumer must take deltas within the write timeout."""


_MERGE_AT = 64
"""Number of deltas of one choice that are merged into one, so that a slow reader costs little more memory than its
text.
"""


def merged(deltas: Sequence[TextDelta]) -> TextDelta:
    """Merge deltas of one choice, in order."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return TextDelta(
        deltas[0].choice,
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        deltas[-1].finish_reason,
        _last_known([delta.num_cached_tokens for delta in deltas]),
        _last_known([delta.prompt_logprobs for delta in deltas]),
        "".join([delta.reasoning for delta in deltas]),
        _merged_calls([call for delta in deltas for call in delta.tool_calls]),
        sum([delta.num_reasoning_tokens for delta in deltas]),
        deltas[-1].stop_reason,
        deltas[-1].drafts,
    )


def _merged_calls(news: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Merge changes of tool calls, in order: one for each call, or two if a call had begun before."""
    groups: list[list[ToolCallDelta]] = []
    for call in news:
        if groups and groups[-1][0].index == call.index and call.name is None:
            groups[-1].append(call)
        else:
            groups.append([call])
    return [
        msgspec.structs.replace(group[0], arguments="".join([call.arguments for call in group])) for group in groups
    ]


def _last_known(values: Sequence[_T | None]) -> _T | None:
    return next((value for value in reversed(values) if value is not None), None)


def _do_nothing() -> None:
    """Do nothing; callback of a closed outbox."""


class Receiver(Protocol):
    """Receiver of deltas that takes them without waiting, instead of a waiting consumer."""

    def ready(self) -> bool:
        """Return True if it can take deltas now."""

    def receive(self, deltas: Sequence[TextDelta]) -> None:
        """Take deltas. Exceptions are raised to the waiting consumer."""


class FlushScheduler:
    """Scheduler of one loop callback in which outboxes hand over their deltas after all pending events were handled.

    The outboxes of a loop share it.
    """

    __slots__ = ("_outboxes",)

    def __init__(self) -> None:
        self._outboxes: list[Outbox] = []

    def add(self, outbox: Outbox) -> None:
        """Schedule one call of `outbox.hand_over`."""
        if not self._outboxes:
            asyncio.get_running_loop().call_soon(self._end)
        self._outboxes.append(outbox)

    def _end(self) -> None:
        outboxes, self._outboxes = self._outboxes, []
        for outbox in outboxes:
            outbox.hand_over()


class Outbox:
    """Queue with one pending delta per choice, merged when it is taken, oldest first. It has one consumer.

    Its memory is bounded by the request's max_tokens. A consumer that leaves it full for `patience` seconds is
    reported once through `on_slow`.

    Attributes:
        receiver: Takes deltas while the consumer waits, except the ends of choices and reports on prompts. When it
            is not ready, the consumer takes all deltas.
    """

    def __init__(self, patience: float, on_slow: Callable[[], None], flush_scheduler: FlushScheduler) -> None:
        self._patience = patience
        self._on_slow = on_slow
        self._flush_scheduler = flush_scheduler
        self._pending: dict[int, list[TextDelta]] = {}
        # Choices with a delta worth delivering, in the order in which they became so.
        self._urgent: dict[int, None] = {}
        # Used instead of these if there is a single delta that will be handed over: the case of most tokens of most
        # streams.
        self._single: TextDelta | None = None
        self._is_due = False
        self._num_tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self._full_timer: asyncio.TimerHandle | None = None
        self.receiver: Receiver | None = None

    def put(self, delta: TextDelta) -> None:
        """Add a delta without waiting."""
        may_pass = (
            self._waiter is not None
            and self.receiver is not None
            and delta.finish_reason is None
            and delta.prompt_logprobs is None
        )
        if may_pass and delta.text and not self._is_due and not self._pending:
            self._single = delta
            self._plan_hand_over()
            return
        if self._single is not None:
            single, self._single = self._single, None
            self._keep(single)
        if self._keep(delta):
            if not may_pass:
                self.wake()
            elif not self._is_due:
                self._plan_hand_over()
            if self._num_tokens >= FULL_AT_TOKENS and self._full_timer is None:
                self._full_timer = asyncio.get_running_loop().call_later(self._patience, self._on_slow)

    def _keep(self, delta: TextDelta) -> bool:
        """Store a delta; return True if there is something worth delivering."""
        choice = delta.choice
        pending = self._pending.get(choice)
        if pending is None:
            self._pending[choice] = [delta]
        else:
            pending.append(delta)
            if len(pending) >= _MERGE_AT:
                pending[:] = [merged(pending)]
        self._num_tokens += len(delta.token_ids)
        # Ids without text wait for the text that they become part of, except the first ids of a choice.
        if (
            delta.text
            or delta.finish_reason
            or delta.reasoning
            or delta.tool_calls
            or delta.logprobs
            or delta.num_cached_tokens is not None
        ):
            self._urgent[choice] = None
        return choice in self._urgent

    def _plan_hand_over(self) -> None:
        # Deferred, so that outputs of several steps that were read together are delivered together.
        self._is_due = True
        self._flush_scheduler.add(self)

    def hand_over(self) -> None:
        """Pass deltas to the receiver if the consumer is still waiting; called by FlushScheduler."""
        self._is_due = False
        waiter, receiver = self._waiter, self.receiver
        if waiter is None or receiver is None or waiter.done():
            return
        try:
            if not receiver.ready():
                self.wake()
            elif (delta := self._single) is not None:
                self._single = None
                receiver.receive((delta,))
            else:
                receiver.receive(list(iter(self.take, None)))
        except Exception as error:  # noqa: BLE001 - handed over whole to the consumer
            self._waiter = None
            waiter.set_exception(error)

    def take(self) -> TextDelta | None:
        """Return the oldest delta worth delivering, or None."""
        if self._single is not None:
            single, self._single = self._single, None
            return single
        for choice in self._urgent:
            del self._urgent[choice]
            pending = self._pending.pop(choice)
            delta = pending[0] if len(pending) == 1 else merged(pending)
            self._num_tokens -= len(delta.token_ids)
            if self._full_timer is not None:
                self._stop_timer()
            return delta
        return None

    def news(self) -> asyncio.Future[None]:
        """Return a future that is done when there is a delta to take, or when the state of the generation changed."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    def wake(self) -> None:
        """Make the consumer check again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Drop pending deltas and break the reference cycle with the callback's owner.

        Otherwise both, and a whole prompt, would wait for the garbage collector.
        """
        self._on_slow = _do_nothing
        self.receiver = self._single = None
        self._pending.clear()
        self._urgent.clear()
        self._stop_timer()
        self.wake()

    def _stop_timer(self) -> None:
        if self._full_timer is not None:
            self._full_timer.cancel()
            self._full_timer = None
