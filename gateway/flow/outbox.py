"""What a generation has for its route and the route has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.flow.events import TextDelta
from shared.messages import TokenLogprobs

FULL_AT_TOKENS = 256
"""From here on the consumer must take something within the write timeout."""


class _Pending:
    """Deltas of one choice, merged."""

    __slots__ = ("finish_reason", "logprobs", "num_cached_tokens", "prompt_logprobs", "texts", "token_ids", "urgent")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: str | None = None
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.urgent = False

    def merge(self, delta: TextDelta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        # Ids without text wait for the text that they become part of; the first of a choice do not.
        self.urgent = self.urgent or bool(
            delta.text or delta.finish_reason or delta.logprobs or delta.num_cached_tokens is not None
        )

    def delta(self, choice: int) -> TextDelta:
        return TextDelta(
            choice,
            "".join(self.texts),
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.num_cached_tokens,
            self.prompt_logprobs,
        )


class Outbox:
    """At most one pending delta per choice, oldest first. One consumer.

    Its memory is bounded by the request's max_tokens; a consumer that leaves it full for `patience` seconds is
    reported through `on_slow`, once.
    """

    def __init__(self, patience: float, on_slow: Callable[[], None]) -> None:
        self._patience = patience
        self._on_slow = on_slow
        self._pending: dict[int, _Pending] = {}
        self._num_tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self._full_timer: asyncio.TimerHandle | None = None

    def put(self, delta: TextDelta) -> None:
        """Never waits."""
        pending = self._pending.get(delta.choice)
        if pending is None:
            pending = self._pending[delta.choice] = _Pending()
        pending.merge(delta)
        self._num_tokens += len(delta.token_ids)
        if pending.urgent:
            self.wake()
            if self._num_tokens >= FULL_AT_TOKENS and self._full_timer is None:
                self._full_timer = asyncio.get_running_loop().call_later(self._patience, self._on_slow)

    def take(self) -> TextDelta | None:
        """The oldest delta that is worth delivering, or None."""
        for choice, pending in self._pending.items():
            if pending.urgent:
                del self._pending[choice]
                self._num_tokens -= len(pending.token_ids)
                self._stop_timer()
                return pending.delta(choice)
        return None

    async def wait(self) -> None:
        """Until there is something to take, or something else happened to the generation."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Lets the consumer look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Drops what is pending."""
        self._pending.clear()
        self._stop_timer()
        self.wake()

    def _stop_timer(self) -> None:
        if self._full_timer is not None:
            self._full_timer.cancel()
            self._full_timer = None
