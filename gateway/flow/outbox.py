"""What a generation has for its route and the route has not taken yet.

Most of what a stream sends is taken by a callback of the loop: a task that is woken for each token costs more than all
else that is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from gateway.flow.events import TextDelta
from gateway.text.message_parser import ToolCallDelta

T = TypeVar("T")

FULL_AT_TOKENS = 256
"""From here on the consumer must take something within the write timeout."""


_MERGE_AT = 64
"""So many deltas of one choice become one, so that a slow reader costs little more than its text."""


def merged(deltas: Sequence[TextDelta]) -> TextDelta:
    """Deltas of one choice, in order, as one."""
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
    """News of calls, in order, one for each call that they are about, or one more where it had begun before."""
    result: list[ToolCallDelta] = []
    pieces: list[str] = []
    for call in news:
        if result and result[-1].index == call.index and call.name is None:
            pieces.append(call.arguments)
            continue
        if len(pieces) > 1:
            result[-1] = msgspec.structs.replace(result[-1], arguments="".join(pieces))
        result.append(call)
        pieces = [call.arguments]
    if len(pieces) > 1:
        result[-1] = msgspec.structs.replace(result[-1], arguments="".join(pieces))
    return result


def _last_known(values: Sequence[T | None]) -> T | None:
    return next((value for value in reversed(values) if value is not None), None)


def _nobody() -> None:
    """Is told of slow consumers of what is closed."""


class Receiver(Protocol):
    """Takes deltas without waiting, in the place of a consumer that waits."""

    def ready(self) -> bool:
        """Whether it can take some now."""
        ...

    def receive(self, deltas: Sequence[TextDelta]) -> None:
        """Takes some. What it raises is raised to the waiting consumer."""
        ...


class Turn:
    """Lets outboxes hand over once all that is being handled now has been: with one callback of the event loop, not one
    for each. Shared by the outboxes of a loop.
    """

    __slots__ = ("_outboxes",)

    def __init__(self) -> None:
        self._outboxes: list[Outbox] = []

    def add(self, outbox: Outbox) -> None:
        """Calls `outbox.hand_over` once."""
        if not self._outboxes:
            asyncio.get_running_loop().call_soon(self._end)
        self._outboxes.append(outbox)

    def _end(self) -> None:
        outboxes, self._outboxes = self._outboxes, []
        for outbox in outboxes:
            outbox.hand_over()


class Outbox:
    """One pending delta per choice, merged when it is taken, oldest first. One consumer.

    Its memory is bounded by the request's max_tokens; a consumer that leaves it full for `patience` seconds is
    reported through `on_slow`, once.

    Attributes:
        receiver: where set, gets what comes while the consumer waits, but for the ends of choices and reports on
            prompts; when it is not ready, the consumer gets that too.
    """

    __slots__ = (
        "_full_timer",
        "_is_due",
        "_num_tokens",
        "_on_slow",
        "_patience",
        "_pending",
        "_single",
        "_turn",
        "_urgent",
        "_waiter",
        "receiver",
    )

    def __init__(self, patience: float, on_slow: Callable[[], None], turn: Turn) -> None:
        self._patience = patience
        self._on_slow = on_slow
        self._turn = turn
        self._pending: dict[int, list[TextDelta]] = {}
        # Choices whose pending delta is worth delivering, in the order in which it became so.
        self._urgent: dict[int, None] = {}
        # Instead of these, where it is the only one and will be handed over: most tokens of most streams.
        self._single: TextDelta | None = None
        self._is_due = False
        self._num_tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self._full_timer: asyncio.TimerHandle | None = None
        self.receiver: Receiver | None = None

    def put(self, delta: TextDelta) -> None:
        """Never waits."""
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
        """Whether there is something worth delivering now."""
        choice = delta.choice
        pending = self._pending.get(choice)
        if pending is None:
            self._pending[choice] = [delta]
        else:
            pending.append(delta)
            if len(pending) >= _MERGE_AT:
                pending[:] = [merged(pending)]
        self._num_tokens += len(delta.token_ids)
        # Ids without text wait for the text that they become part of; the first of a choice do not.
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
        # Not at once: news of several steps that were read together goes out together.
        self._is_due = True
        self._turn.add(self)

    def hand_over(self) -> None:
        """Gives the receiver what is worth delivering, if the consumer still waits. For Turn."""
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
                receiver.receive(self._take_all())
        except Exception as error:  # noqa: BLE001 - handed over whole to the consumer
            self._waiter = None
            waiter.set_exception(error)

    def _take_all(self) -> list[TextDelta]:
        deltas = []
        while (delta := self.take()) is not None:
            deltas.append(delta)
        return deltas

    def take(self) -> TextDelta | None:
        """The oldest delta that is worth delivering, or None."""
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
        """To be awaited: done when there is something to take, or something else happened to the generation."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    def wake(self) -> None:
        """Lets the consumer look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Drops what is pending, and lets go of whom it reports to, who has it: both would wait for the garbage
        collector, and a whole prompt with them.
        """
        self._on_slow = _nobody
        self.receiver = self._single = None
        self._pending.clear()
        self._urgent.clear()
        self._stop_timer()
        self.wake()

    def _stop_timer(self) -> None:
        if self._full_timer is not None:
            self._full_timer.cancel()
            self._full_timer = None
