"""Whether work grows in proportion to what it is done on, told on a machine that may be busy with something else."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

_ATTEMPTS = 6
_SLACK = 2.0
_ROUNDING = 0.01
"""Seconds."""


def expect_linear(work: Callable[[int], object], small: int, large: int) -> None:
    """Fails where the processor's time for `large` is beyond twice what the proportion to `small` says, in all
    attempts: a disturbance is over by then, and growth with the square is not.

    Args:
        large: at least four times `small`.
    """
    assert large >= 4 * small
    work(small)
    for _ in range(_ATTEMPTS):
        few, many = _seconds(work, small), _seconds(work, large)
        if many < _SLACK * large / small * few + _ROUNDING:
            return
    pytest.fail(f"{few:.4f} s for {small}, {many:.4f} s for {large}")


def _seconds(work: Callable[[int], object], size: int) -> float:
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time()
        work(size)
        return time.thread_time() - began
    finally:
        gc.enable()
