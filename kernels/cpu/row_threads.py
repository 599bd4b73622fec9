"""Rows shared out among Python's threads, for compiled functions that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class RowThreads:
    """Threads that start when there are first rows for them.

    Args:
        num_threads: with the one that calls.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name) if num_threads > 1 else None

    def run(self, run: Callable[..., None], num_rows: int) -> None:
        """Calls run(start=, end=) for parts of the rows, and returns when all are done."""
        if self._threads is None or num_rows < 2:
            run(start=0, end=num_rows)
            return
        parts = min(self._num_threads, num_rows)
        bounds = [num_rows * i // parts for i in range(parts + 1)]
        futures = [self._threads.submit(run, start=bounds[i], end=bounds[i + 1]) for i in range(1, parts)]
        run(start=bounds[0], end=bounds[1])
        for future in futures:
            future.result()
