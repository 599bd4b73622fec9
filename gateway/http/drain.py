"""Orderly shutdown: counts requests in flight, gives them time to finish, and then ends the rest with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shared.errors import InvalidRequestError, PeltonError, RateLimitError, UnavailableError


class Drain:
    """Requests in flight of one gateway process, and whether it accepts new ones.

    Args:
        max_requests: Number of requests above which new ones get status 429.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._tasks: set[asyncio.Task[object]] = set()
        # Owner and task by id. Clients choose the ids of HTTP requests, so several requests may have the same id.
        self._named: dict[str, list[tuple[bytes, asyncio.Task[object] | None]]] = {}
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

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count the running task as a request in flight inside the context.

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
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._aborted.discard(task)
            if not self._tasks:
                self._idle.set()

    @contextmanager
    def named(self, names: Sequence[str], owner: bytes) -> Iterator[None]:
        """Let the running task be aborted by names that its client knows inside the context.

        Args:
            names: Id of the response and id of the HTTP request.
            owner: Hash of the key that sent the request.
        """
        entry = (owner, asyncio.current_task())
        for name in names:
            self._named.setdefault(name, []).append(entry)
        try:
            yield
        finally:
            for name in names:
                self._named[name].remove(entry)
                if not self._named[name]:
                    del self._named[name]

    def abort(self, name: str, owner: bytes | None) -> int:
        """Abort the requests with a name and return their number. They answer with an error.

        Args:
            name: Id of a response or of an HTTP request.
            owner: Hash of the key whose requests are meant; None for all keys.
        """
        found = [task for sender, task in self._named.get(name, ()) if owner in (None, sender)]
        for task in set(found):
            # A second cancellation would hide how the request ended.
            if task is not None and task in self._tasks and task not in self._aborted:
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
