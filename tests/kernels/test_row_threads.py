"""Distribution of rows among threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numba import njit

from kernels.common.cpu.claims import next_row
from kernels.common.cpu.row_threads import Claims, RowThreads


@njit(nogil=True)
def count_rows(claims: Any, counts: Any) -> None:
    row = next_row(claims)
    while row >= 0:
        counts[row] += 1
        row = next_row(claims)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 10_000])
def test_every_row_is_done_once(num_threads: int, num_rows: int) -> None:
    threads = RowThreads(num_threads, "test")
    counts = np.zeros(num_rows + 1, dtype=np.int64)
    for _ in range(20):
        threads.run(lambda claims: count_rows(claims, counts), num_rows)
    assert (counts[:num_rows] == 20).all()
    assert counts[num_rows] == 0


def test_one_slow_row_holds_up_no_other() -> None:
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
