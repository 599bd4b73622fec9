"""What the garbage collector looks at, and what malloc keeps."""

from __future__ import annotations

import gc
import os
import platform
import weakref

import pytest

from gateway.service import freeze_long_lived_objects, trim_malloc
from scripts._bench.process_memory import resident_bytes


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def seen(one: object) -> bool:
    return any(found is one for found in gc.get_objects())


def test_what_is_there_is_not_looked_at_again_and_what_comes_is():
    before = Cycle()
    freeze_long_lived_objects()
    after = Cycle()
    assert not seen(before) and seen(after)
    gone = weakref.ref(after)
    del after
    gc.collect()
    assert gone() is None


def test_what_was_left_meanwhile_goes_with_the_next_time():
    old = Cycle()
    freeze_long_lived_objects()
    gone = weakref.ref(old)
    del old
    freeze_long_lived_objects()
    assert gone() is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others give it back by themselves")
def test_what_was_freed_is_given_back():
    texts = [bytes([index % 251]) * 100_000 for index in range(1000)]
    held = texts[::50]  # what is between them malloc keeps
    del texts
    before = resident_bytes(os.getpid())
    trim_malloc()
    assert before - resident_bytes(os.getpid()) > 50_000_000
    assert len(held) == 20
