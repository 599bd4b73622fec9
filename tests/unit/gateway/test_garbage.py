"""What the garbage collector looks at."""

from __future__ import annotations

import gc
import weakref

import pytest

from gateway.garbage import settle


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
    settle()
    after = Cycle()
    assert not seen(before) and seen(after)
    gone = weakref.ref(after)
    del after
    gc.collect()
    assert gone() is None


def test_what_was_left_meanwhile_goes_with_the_next_time():
    old = Cycle()
    settle()
    gone = weakref.ref(old)
    del old
    settle()
    assert gone() is None
