"""Rows shared out among Python's threads, for compiled functions that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Claims = np.ndarray[Any, np.dtype[np.int64]]
"""[2]: the next row that no thread has begun, and the number of rows; kernels/common/cpu/claims.py takes rows
from it.
"""


class RowThreads:
    """Threads that start when there are first rows for them.

    Args:
        num_threads: with the one that calls.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name) if num_threads > 1 else None

    def run(self, run: Callable[[Claims], None], num_rows: int) -> None:
        """Calls `run` in each thread with the same claims, and returns when all rows are done.

        Rows cost very different times, and a thread may be late: so each takes one row after the other.
        """
        claims = claims_of(num_rows)
        if self._threads is None or num_rows < 2:
            run(claims)
            return
        helpers = range(1, min(self._num_threads, num_rows))
        futures = [self._threads.submit(run, claims) for _ in helpers]
        run(claims)
        for future in futures:
            # One that has not begun would find nothing left.
            if not future.cancel():
                future.result()


def claims_of(num_rows: int) -> Claims:
    """Of rows that nobody has begun."""
    return np.array([0, num_rows], dtype=np.int64)
