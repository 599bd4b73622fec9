"""Whether work grows in proportion to what it is done on, told on a machine that may be busy with something else; and
whether something is kept of work that is over.
"""

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


def held() -> Counter[str]:
    """What this process holds: how many objects that refer to others, by their type, and how many elements are in
    containers, where texts, bytes and numbers are.
    """
    gc.collect()
    objects = gc.get_objects()
    # Not Counter(iterable): it asks whether that is a Mapping, which each of the hundred kinds of those remembers.
    counts: Counter[str] = Counter()
    for one in objects:
        counts[f"{type(one).__module__}.{type(one).__qualname__}"] += 1
    counts["elements"] = sum(len(one) for one in objects if type(one) in _CONTAINERS)
    return counts


def kept(before: Counter[str], after: Counter[str], *, most: int) -> dict[str, int]:
    """Of which types, and whether of elements, there are more than `most` that were not there before."""
    return {name: count for name, count in (after - before).items() if count > most}


def expect_nothing_kept(before: Counter[str], after: Counter[str], *, most: int) -> None:
    """Fails where there are such."""
    grown = kept(before, after, most=most)
    assert not grown, f"kept: {grown}"
