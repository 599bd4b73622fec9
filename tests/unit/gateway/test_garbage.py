"""Exclusion of long-lived objects from garbage collection, and release of free memory."""

from __future__ import annotations

import gc
import os
import platform
import weakref

import pytest

from gateway.service import freeze_long_lived_objects, trim_malloc
from scripts._bench.measurements import resident_bytes


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def is_tracked(value: object) -> bool:
    return any(found is value for found in gc.get_objects())


def test_existing_objects_are_frozen_until_the_next_call_and_new_ones_are_not():
    before = Cycle()
    freeze_long_lived_objects()
    after = Cycle()
    assert not is_tracked(before) and is_tracked(after)
    gone = weakref.ref(after)
    del after
    gc.collect()
    assert gone() is None
    gone = weakref.ref(before)
    del before
    freeze_long_lived_objects()
    assert gone() is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim belongs to glibc")
def test_freed_memory_is_returned():
    texts = [bytes([index % 251]) * 100_000 for index in range(1000)]
    held = texts[::50]  # malloc keeps the memory between them
    del texts
    before = resident_bytes(os.getpid())
    trim_malloc()
    assert before - resident_bytes(os.getpid()) > 50_000_000
    assert len(held) == 20
