"""Waiting for another thread in compiled code."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
from numba import cfunc, types

from kernels.common.cpu.simd import atomic_add, wait_for

HANDOVERS = 30_000


@cfunc(types.void(types.int64, types.int64))
def take_turns(counter: Any, first: Any) -> None:
    for turn in range(HANDOVERS):
        wait_for(counter, 2 * turn + first)
        atomic_add(counter, 1)


def test_threads_that_share_a_processor_let_each_other_work() -> None:
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
