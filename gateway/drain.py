"""Orderly end: counts requests in flight, lets them finish for a while, then ends what is left truthfully."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.errors import RateLimitError, UnavailableError


@dataclass(frozen=True, slots=True)
class Place:
    """That of a task among the requests in flight, held as a context."""

    _drain: Drain
    _task: asyncio.Task[object]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._drain.leave(self._task)


class Drain:
    """Requests in flight of one gateway, and whether it still takes new ones.

    Args:
        max_requests: above it new ones are refused with 429.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._deadline: asyncio.Timeout | None = None
        self.draining = False
        self.expired = False

    @property
    def num_in_flight(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._tasks)

    def admit(self) -> Place:
        """Holds a place for the running task. Raises UnavailableError while draining, RateLimitError when full."""
        if self.draining:
            raise self.error()
        if len(self._tasks) >= self._max_requests:
            raise RateLimitError(
                f"The server has {self._max_requests} requests in flight, its limit. Try again later.", retry_after=1.0
            )
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("admit is for a running task")
        self._tasks.add(task)
        self._idle.clear()
        return Place(self, task)

    def leave(self, task: asyncio.Task[object]) -> None:
        """Gives a place back. Only for Place."""
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    def begin(self) -> None:
        """From now on new requests get 503."""
        self.draining = True

    async def wait(self, timeout: float) -> bool:
        """Lets requests finish for `timeout` seconds, then cancels the rest, which end with `error()`.

        Returns whether all had finished.
        """
        try:
            async with asyncio.timeout(timeout) as self._deadline:
                await self._idle.wait()
            return True
        except TimeoutError:
            self.expired = True
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            # Each has an error event to write; a client that does not read must not hold up the exit.
            await asyncio.wait(list(self._tasks), timeout=2.0)
        return False

    def hurry(self) -> None:
        """Ends a `wait` under way as if its time were up."""
        if self._deadline is not None and not self.expired:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def take_over_cancellation(self) -> UnavailableError | None:
        """Called with CancelledError caught: if this drain cancelled the task, the error to answer with, else None."""
        task = asyncio.current_task()
        if not self.expired or task is None or task not in self._tasks:
            return None
        task.uncancel()
        return self.error()

    @staticmethod
    def error() -> UnavailableError:
        """What a request gets that cannot be served or finished any more."""
        return UnavailableError("The server is shutting down. Try again.", retry_after=1.0)
