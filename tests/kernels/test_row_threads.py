"""Distribution of rows among threads, and waiting for another thread in compiled code."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
import pytest
from numba import cfunc, njit, types

from kernels.common.cpu.row_threads import Claims, RowThreads, next_row
from kernels.common.cpu.simd import atomic_add, wait_for

HANDOVERS = 30_000


@njit(nogil=True)
def count_rows(claims: Any, counts: Any) -> None:
    row = next_row(claims)
    while row >= 0:
        counts[row] += 1
        row = next_row(claims)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 10_000])
def test_every_row_is_processed_once(num_threads: int, num_rows: int) -> None:
    threads = RowThreads(num_threads, "test")
    counts = np.zeros(num_rows + 1, dtype=np.int64)
    for _ in range(20):
        threads.run(lambda claims: count_rows(claims, counts), num_rows)
    assert (counts[:num_rows] == 20).all()
    assert counts[num_rows] == 0


def test_slow_row_does_not_delay_others() -> None:
    """The thread with the slow row waits until all other rows are done, so the other thread must process them."""
    taking, done = threading.Lock(), threading.Semaphore(0)

    def run(claims: Claims) -> None:
        while True:
            with taking:
                row = int(claims[0])
                claims[0] += 1
            if row >= claims[1]:
                return
            if row > 0:
                done.release()
            else:
                for _ in range(5):
                    assert done.acquire(timeout=20)

    RowThreads(2, "test").run(run, 6)


@cfunc(types.void(types.int64, types.int64))
def take_turns(counter: Any, first: Any) -> None:
    for turn in range(HANDOVERS):
        wait_for(counter, 2 * turn + first)
        atomic_add(counter, 1)


def test_waiting_threads_yield_the_processor() -> None:
    """Two spinning threads on one processor would take minutes; yielding takes less than a second."""
    counter = np.zeros(1, dtype=np.int64)
    turns = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(take_turns.address)
    one = {min(os.sched_getaffinity(0))}

    def run(first: int) -> None:
        os.sched_setaffinity(0, one)  # applies to this thread only
        turns(counter.ctypes.data, first)

    threads = [threading.Thread(target=run, args=(first,), daemon=True) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert counter[0] == 2 * HANDOVERS
