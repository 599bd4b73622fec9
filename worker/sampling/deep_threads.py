"""Threads for work that may recurse deeply and may not terminate, such as compiling grammars sent by clients.

A stack overflow in native code ends the process, so these threads have large stacks; the memory is reserved, but only
allocated when used. A thread cannot be terminated from outside. If its work takes too long, the thread is abandoned
and replaced, until too many abandoned threads are still running.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from shared.errors import UnavailableError

T = TypeVar("T")

STACK_BYTES = 512 << 20

_stack_size_lock = threading.Lock()
"""Lock for the interpreter's stack size, which applies to all threads started afterwards."""


class DeepThreads:
    """A few daemon threads, started when they are first needed. The methods must be called from one thread.

    Args:
        name: Name of the threads.
        num_threads: Maximum number of working threads.
        max_abandoned: Number of running abandoned threads from which no more work is accepted.
    """

    def __init__(self, name: str, *, num_threads: int = 2, max_abandoned: int = 4) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_abandoned = max_abandoned
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_abandoned = 0
        self._num_unfinished = 0
        self._running: set[_Work] = set()

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned threads that are still running."""
        return self._num_abandoned

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run the function in one of the threads. The future receives its result or exception.

        Raises:
            UnavailableError: Too many threads are abandoned, or no thread can be started.
        """
        if self._num_abandoned >= self._max_abandoned:
            raise UnavailableError(
                "The server cannot compile grammars now, because earlier compilations have not ended. Try again later."
            )
        with self._lock:
            needs_thread = self._num_alive < min(self._num_threads, self._num_unfinished + 1)
        if needs_thread and not self._start_thread() and not self._num_alive:
            raise _no_memory()
        work = _Work(function)
        with self._lock:
            self._num_unfinished += 1
        self._queue.put(work)
        return work.future

    def abandon(self, future: Future[Any]) -> None:
        """Stop waiting for running work and replace its thread."""
        with self._lock:
            work = next((work for work in self._running if work.future is future and not work.abandoned), None)
            if work is None:
                return
            work.abandoned = True
            self._num_abandoned += 1
            self._num_alive -= 1
        if not self._start_thread() and not self._num_alive:
            self._reject_queued()

    def close(self) -> None:
        """Make idle threads exit."""
        for _ in range(self._num_alive):
            self._queue.put(None)

    def _reject_queued(self) -> None:
        """Fail all queued work, because no thread is left to run it."""
        while True:
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return
            if work is None:
                continue
            with self._lock:
                self._num_unfinished -= 1
            if work.future.set_running_or_notify_cancel():
                work.future.set_exception(_no_memory())

    def _start_thread(self) -> bool:
        with _stack_size_lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError:  # not enough memory for another stack
                return False
            finally:
                threading.stack_size(before)
        with self._lock:
            self._num_alive += 1
        return True

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if work.future.set_running_or_notify_cancel():
                with self._lock:
                    self._running.add(work)
                try:
                    work.future.set_result(work.function())
                except BaseException as error:  # noqa: BLE001 - the future reports it
                    work.future.set_exception(error)
            with self._lock:
                self._running.discard(work)
                self._num_unfinished -= 1
                self._num_abandoned -= work.abandoned
            if work.abandoned:
                return


def _no_memory() -> UnavailableError:
    return UnavailableError("The server has no memory left to compile grammars. Try again later.")


class _Work:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.function = function
        self.abandoned = False
