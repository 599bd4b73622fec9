"""Reference counts and the order in which free pages are allocated."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.kv.block_pool import BlockPool, OutOfPagesError


def test_blank_pages_are_allocated_first_then_cached_in_release_order():
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    pages = pool.allocate(4)
    assert pages == [0, 1, 2, 3]
    for page in (2, 0, 1):
        pool.release(page, findable=True)
    pool.release(3, findable=False)
    assert pool.allocate(3) == [3, 2, 0]
    assert evicted == [2, 0]
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_reacquired_page_is_not_evicted():
    pool = BlockPool(2, lambda page: None)
    first, second = pool.allocate(2)
    pool.release(first, findable=True)
    pool.release(second, findable=True)
    pool.acquire(first)
    assert pool.allocate(1) == [second]
    with pytest.raises(OutOfPagesError, match="1 pages wanted, 0 of 2 free"):
        pool.allocate(1)


def test_excess_release_raises():
    pool = BlockPool(1, lambda page: None)
    (page,) = pool.allocate(1)
    pool.release(page, findable=False)
    with pytest.raises(ValueError, match="page 0 was released more often"):
        pool.release(page, findable=False)


def test_check_detects_lost_page():
    pool = BlockPool(2, lambda page: None)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([], set())
    pool.check([0], set())
    with pytest.raises(AssertionError, match="cached pages differ"):
        pool.check([0], {1})


class PoolMachine(RuleBasedStateMachine):
    """Random operations compared with a model: a list of holders and the set of findable pages."""

    def __init__(self) -> None:
        super().__init__()
        self.findable: set[int] = set()
        self.held: list[int] = []
        self.pool = BlockPool(6, self.findable.remove)

    @precondition(lambda self: self.pool.num_free > 0)
    @rule()
    def allocate(self) -> None:
        self.held += self.pool.allocate(1)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), findable=st.booleans())
    def release(self, data, findable: bool) -> None:
        page = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if findable:
            self.findable.add(page)
        self.pool.release(page, findable=page in self.findable)

    @precondition(lambda self: self.held or self.findable)
    @rule(data=st.data())
    def acquire(self, data) -> None:
        page = data.draw(st.sampled_from(sorted({*self.held, *self.findable})))
        self.pool.acquire(page)
        self.held.append(page)

    @precondition(lambda self: self.findable)
    @rule(data=st.data())
    def forget(self, data) -> None:
        page = data.draw(st.sampled_from(sorted(self.findable)))
        self.findable.remove(page)
        self.pool.forget(page)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check(self.held, self.findable)
        assert self.pool.num_free == 6 - len(set(self.held))


TestPoolMachine = PoolMachine.TestCase
