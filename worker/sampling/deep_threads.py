"""Threads for work that may recurse deeply and may never end, as compiling what a client sent.

Native code that overflows its stack ends the process, so these stacks are large: the memory is reserved, and taken only
where it is used. A thread cannot be ended from outside: one whose work takes too long is written off, and another takes
its place until too many are lost.
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

_starting = threading.Lock()
"""The size of a stack is the interpreter's, for the thread that is started next."""


class DeepThreads:
    """A few daemon threads, started when they are first needed. Its methods are for one thread.

    Args:
        name: of the threads.
        num_threads: that work at a time.
        max_lost: threads written off and still busy, from which on nothing more is taken.
    """

    def __init__(self, name: str, *, num_threads: int = 2, max_lost: int = 4) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_lost = max_lost
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_lost = 0
        self._num_unfinished = 0
        self._running: set[_Work] = set()

    @property
    def num_lost(self) -> int:
        """Threads that were written off and have not come back."""
        return self._num_lost

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs the function in one of the threads; what it raises is the future's.

        Raises UnavailableError where too many threads are lost, or none can be started.
        """
        if self._num_lost >= self._max_lost:
            raise UnavailableError("Earlier work of this kind takes too long and has not ended.")
        with self._lock:
            starts = self._num_alive < min(self._num_threads, self._num_unfinished + 1)
        if starts and not self._start_thread() and not self._num_alive:
            raise _no_memory()
        work = _Work(function)
        with self._lock:
            self._num_unfinished += 1
        self._queue.put(work)
        return work.future

    def write_off(self, future: Future[Any]) -> None:
        """Waits no longer for work that has begun: another thread takes its thread's place."""
        with self._lock:
            lost = next((work for work in self._running if work.future is future and not work.lost), None)
            if lost is None:
                return
            lost.lost = True
            self._num_lost += 1
            self._num_alive -= 1
        if not self._start_thread() and not self._num_alive:
            self._refuse_queued()

    def close(self) -> None:
        """Lets the threads end that have nothing to do."""
        for _ in range(self._num_alive):
            self._queue.put(None)

    def _refuse_queued(self) -> None:
        """No thread is left to take what waits, and whoever waits for it would wait for ever."""
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
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError:  # the system has no room for another stack
                return False
            finally:
                threading.stack_size(before)
        with self._lock:
            self._num_alive += 1
        return True

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if work.future.set_running_or_notify_cancel():
                with self._lock:
                    self._running.add(work)
                work.run()
            with self._lock:
                self._running.discard(work)
                self._num_unfinished -= 1
                self._num_lost -= work.lost
            if work.lost:
                return


def _no_memory() -> UnavailableError:
    return UnavailableError("The server has no memory left for this kind of work.")


class _Work:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.lost = False
        self._function = function

    def run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
