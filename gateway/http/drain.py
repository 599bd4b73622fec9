"""Orderly end: counts requests in flight, lets them finish for a while, then ends what is left truthfully."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequestError, PeltonError, RateLimitError, UnavailableError


@dataclass(frozen=True, slots=True)
class Place:
    """That of a task among the requests in flight, held as a context."""

    _drain: Drain
    _task: asyncio.Task[object]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._drain.leave(self._task)


class Named:
    """A request in flight by the names that its client knows it by; for the task that enters it, until that leaves.

    Args:
        names: the id of its response, and that of the HTTP request.
        owner: hash of the key whose request it is.
    """

    __slots__ = ("_drain", "names", "owner", "task")

    def __init__(self, drain: Drain, names: Sequence[str], owner: bytes) -> None:
        self._drain = drain
        self.names = names
        self.owner = owner
        self.task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        self.task = asyncio.current_task()
        self._drain.add_named(self)

    def __exit__(self, *_: object) -> None:
        self._drain.remove_named(self)


class Drain:
    """Requests in flight of one gateway, and whether it still takes new ones.

    Args:
        max_requests: above it new ones are refused with 429.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._tasks: set[asyncio.Task[object]] = set()
        # An HTTP request's id is its client's choice: several may have the same.
        self._named: dict[str, list[Named]] = {}
        self._aborted: set[asyncio.Task[object]] = set()
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
        self._aborted.discard(task)
        if not self._tasks:
            self._idle.set()

    def named(self, names: Sequence[str], owner: bytes) -> Named:
        """A context in which the running task can be aborted by any of the names."""
        return Named(self, names, owner)

    def add_named(self, named: Named) -> None:
        """Only for Named."""
        for name in named.names:
            self._named.setdefault(name, []).append(named)

    def remove_named(self, named: Named) -> None:
        """Only for Named."""
        for name in named.names:
            self._named[name].remove(named)
            if not self._named[name]:
                del self._named[name]

    def abort(self, name: str, owner: bytes | None) -> int:
        """Ends the requests of that name, which answer with an error; returns how many there were.

        Args:
            owner: whose requests are meant; None: everybody's.
        """
        found = [named for named in self._named.get(name, ()) if owner in (None, named.owner)]
        for task in {named.task for named in found}:
            # Cancelled twice it could not say how it ended.
            if task in self._tasks and task not in self._aborted:
                self._aborted.add(task)
                task.cancel()
        return len(found)

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

    def take_over_cancellation(self) -> PeltonError | None:
        """Called with CancelledError caught: if this drain cancelled the task, the error to answer with, else None."""
        task = asyncio.current_task()
        if task is None or task not in self._tasks:
            return None
        error: PeltonError | None = self.error() if self.expired else None
        if task in self._aborted:
            error = InvalidRequestError("The request was aborted on demand.", code="request_aborted")
        if error is not None:
            task.uncancel()
        return error

    @staticmethod
    def error() -> UnavailableError:
        """What a request gets that cannot be served or finished any more."""
        return UnavailableError("The server is shutting down. Try again.", retry_after=1.0)
