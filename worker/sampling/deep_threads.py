"""Threads for work that may recurse deeply and may not terminate, such as compiling grammars sent by clients.

A stack overflow in native code ends the process, so these threads have large stacks; the memory is reserved, but only
allocated when used. A thread cannot be terminated from outside. If its work takes too long, the thread is abandoned
and replaced, until too many abandoned threads are still running.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from shared.errors import UnavailableError

T = TypeVar("T")

STACK_BYTES = 512 << 20

_stack_size_lock = threading.Lock()
"""Lock for the interpreter's stack size, which applies to all threads started afterwards."""


class DeepThreads:
    """A daemon thread for each piece of work, of which a few run at a time. Call the methods from one thread.

    Args:
        name: Name of the threads.
        num_threads: Maximum number of working threads.
        max_abandoned: Number of running abandoned threads from which no more work is accepted.
    """

    def __init__(self, name: str, *, num_threads: int = 2, max_abandoned: int = 4) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_abandoned = max_abandoned
        self._lock = threading.RLock()  # callbacks of a future may be called with the lock held
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: set[Future[Any]] = set()
        self._abandoned: set[Future[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned threads that are still running."""
        return len(self._abandoned)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run the function in a thread. The future receives its result or exception.

        The exception is UnavailableError if no thread can be started.

        Raises:
            UnavailableError: Too many threads are abandoned.
        """
        if self.num_abandoned >= self._max_abandoned:
            raise UnavailableError(
                "The server cannot compile grammars now, because earlier compilations have not ended. Try again later."
            )
        future: Future[T] = Future()
        with self._lock:
            self._queue.append((future, function))
            self._start_threads()
        return future

    def abandon(self, future: Future[Any]) -> None:
        """Stop waiting for running work and replace its thread."""
        with self._lock:
            if future in self._running:
                self._running.remove(future)
                self._abandoned.add(future)
                self._start_threads()

    def _start_threads(self) -> None:
        """Start as much of the queued work as may run. The caller holds the lock."""
        while self._queue and len(self._running) < self._num_threads:
            future, function = self._queue[0]
            thread = threading.Thread(target=self._run, args=(future, function), name=self._name, daemon=True)
            with _stack_size_lock:
                before = threading.stack_size(STACK_BYTES)
                try:
                    thread.start()
                except RuntimeError:  # not enough memory for another stack
                    if self._running:
                        return  # the end of that work starts this one
                    if future.set_running_or_notify_cancel():
                        future.set_exception(
                            UnavailableError("The server has no memory left to compile grammars. Try again later.")
                        )
                else:
                    self._running.add(future)
                finally:
                    threading.stack_size(before)
            self._queue.popleft()

    def _run(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the future reports it
                future.set_exception(error)
        with self._lock:
            self._running.discard(future)
            self._abandoned.discard(future)
            self._start_threads()
