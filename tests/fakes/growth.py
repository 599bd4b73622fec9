"""Assertions on growth: processor time proportional to the input size, and no objects retained after the work."""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable

import pytest

_CONTAINERS = (dict, list, set, deque)
_ATTEMPTS = 6
_SLACK = 2.0
_ROUNDING = 0.01
"""Rounding allowance in seconds."""


def expect_linear(work: Callable[[int], object], small: int, large: int) -> None:
    """Fail if the processor time for `large` is over twice the proportion to `small` in all attempts.

    Repetition excludes temporary disturbances by other processes, but not quadratic growth.

    Args:
        work: Function of a size.
        small: Small size.
        large: Large size, at least four times `small`.
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


def held() -> Counter[str]:
    """Return the number of live container objects by type, and the number of elements in containers."""
    gc.collect()
    objects = gc.get_objects()
    # Not Counter(iterable): it tests for Mapping, and each of the hundred types would stay in the ABC cache.
    counts: Counter[str] = Counter()
    for one in objects:
        counts[f"{type(one).__module__}.{type(one).__qualname__}"] += 1
    counts["elements"] = sum(len(one) for one in objects if type(one) in _CONTAINERS)
    return counts


def kept(before: Counter[str], after: Counter[str], *, most: int) -> dict[str, int]:
    """Return the types (or elements) of which there are more than `most` new ones."""
    return {name: count for name, count in (after - before).items() if count > most}
