"""Distribution of rows among Python threads, for compiled functions that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kernels.common.cpu.simd import atomic_add, inner_numpy

Claims = np.ndarray[Any, np.dtype[np.int64]]
"""[2]: next row that has not begun, and number of rows; `next_row` takes rows from it."""


@inner_numpy
def next_row(claims):  # type: ignore[no-untyped-def]
    """Return the next row of RowThreads' claims; -1 if none is left."""
    row = atomic_add(np.int64(claims.ctypes.data), np.int64(1))
    return row if row < claims[1] else -1


class RowThreads:
    """Threads that start with the first rows for them.

    Args:
        num_threads: Number of threads, including the caller.
        name: Name of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name) if num_threads > 1 else None

    def run(self, run: Callable[[Claims], None], num_rows: int) -> None:
        """Call `run` in each thread with the same claims; return when all rows are done.

        The time of rows varies, and a thread may be delayed, so each thread takes one row after the other.
        """
        claims = claims_of(num_rows)
        if self._threads is None or num_rows < 2:
            run(claims)
            return
        helpers = range(1, min(self._num_threads, num_rows))
        futures = [self._threads.submit(run, claims) for _ in helpers]
        run(claims)
        for future in futures:
            # A thread that has not begun would find nothing left.
            if not future.cancel():
                future.result()


def claims_of(num_rows: int) -> Claims:
    """Return claims of rows that have not begun."""
    return np.array([0, num_rows], dtype=np.int64)
