"""Orderly shutdown: counts requests in flight, gives them time to finish, and then ends the rest with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequestError, PeltonError, RateLimitError, UnavailableError


@dataclass(frozen=True, slots=True)
class InFlightSlot:
    """A task's slot in the in-flight counter, as a context manager."""

    _drain: Drain
    _task: asyncio.Task[object]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._drain.leave(self._task)


class Named:
    """Context in which the running task can be aborted by the names that its client knows.

    Args:
        drain: Registry of requests in flight.
        names: Id of the response and id of the HTTP request.
        owner: Hash of the key that sent the request.
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
    """Requests in flight of one gateway process, and whether it accepts new ones.

    Args:
        max_requests: Number of requests above which new ones get status 429.
        retry_after: Seconds after which a client may try again.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._tasks: set[asyncio.Task[object]] = set()
        # Clients choose the ids of HTTP requests, so several requests may have the same id.
        self._named: dict[str, list[Named]] = {}
        self._aborted: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._deadline: asyncio.Timeout | None = None
        self.draining = False
        self.expired = False

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were admitted and have not ended."""
        return len(self._tasks)

    def admit(self) -> InFlightSlot:
        """Reserve a slot for the running task.

        Raises:
            UnavailableError: The server is shutting down.
            RateLimitError: The limit of requests in flight is reached.
        """
        if self.draining:
            raise self.error()
        if len(self._tasks) >= self._max_requests:
            raise RateLimitError(
                f"The server has {self._max_requests} requests in flight, which is its limit. Try again later.",
                retry_after=1.0,
            )
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("admit must be called from a task")
        self._tasks.add(task)
        self._idle.clear()
        return InFlightSlot(self, task)

    def leave(self, task: asyncio.Task[object]) -> None:
        """Release a task's slot; called by InFlightSlot."""
        self._tasks.discard(task)
        self._aborted.discard(task)
        if not self._tasks:
            self._idle.set()

    def named(self, names: Sequence[str], owner: bytes) -> Named:
        """Return a context in which the running task can be aborted by any of the names."""
        return Named(self, names, owner)

    def add_named(self, named: Named) -> None:
        """Register names; called by Named."""
        for name in named.names:
            self._named.setdefault(name, []).append(named)

    def remove_named(self, named: Named) -> None:
        """Remove names; called by Named."""
        for name in named.names:
            self._named[name].remove(named)
            if not self._named[name]:
                del self._named[name]

    def abort(self, name: str, owner: bytes | None) -> int:
        """Abort the requests with a name and return their number. They answer with an error.

        Args:
            name: Id of a response or of an HTTP request.
            owner: Hash of the key whose requests are meant; None for all keys.
        """
        found = [named for named in self._named.get(name, ()) if owner in (None, named.owner)]
        for task in {named.task for named in found}:
            # A second cancellation would hide how the request ended.
            if task in self._tasks and task not in self._aborted:
                self._aborted.add(task)
                task.cancel()
        return len(found)

    def begin(self) -> None:
        """Refuse new requests with status 503 from now on."""
        self.draining = True

    async def wait(self, timeout: float) -> bool:
        """Let requests finish for `timeout` seconds, then cancel the rest, which end with `error()`.

        Returns:
            True if all requests had finished.
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
            # Each cancelled request has an error event to write. A client that does not read must not delay the exit.
            await asyncio.wait(list(self._tasks), timeout=2.0)
        return False

    def hurry(self) -> None:
        """End a running `wait` as if its time were up."""
        if self._deadline is not None and not self.expired:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def take_over_cancellation(self) -> PeltonError | None:
        """Return the error to answer with if this drain cancelled the running task, else None.

        Call it with CancelledError caught.
        """
        task = asyncio.current_task()
        if task is None or task not in self._tasks:
            return None
        error: PeltonError | None = self.error() if self.expired else None
        if task in self._aborted:
            error = InvalidRequestError("The request was aborted by a client's request.", code="request_aborted")
        if error is not None:
            task.uncancel()
        return error

    @staticmethod
    def error() -> UnavailableError:
        """Return the error for a request that cannot be accepted or finished because of the shutdown."""
        return UnavailableError("The server is shutting down. Try again.", retry_after=1.0)
