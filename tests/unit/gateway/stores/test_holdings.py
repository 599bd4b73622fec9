"""Sizes of stored data by owner."""

from __future__ import annotations

import random

from gateway.stores.holdings import Holdings
from tests.fakes.growth import expect_linear


def test_largest_owner_matches_a_naive_count():
    random.seed(5)
    holdings, amounts = Holdings(), dict.fromkeys((b"%d" % number for number in range(20)), 0)
    for _ in range(5000):
        owner = random.choice(list(amounts))
        change = random.randint(-amounts[owner], 100) if random.random() < 0.8 else -amounts[owner]
        amounts[owner] += change
        holdings.add(owner, change)
        assert holdings.total == sum(amounts.values()) and len(holdings) == sum(map(bool, amounts.values()))
        if holdings.total and random.random() < 0.5:
            assert amounts[holdings.largest()] == max(amounts.values())
    assert len(holdings._heap) < 200


def test_largest_takes_amortized_logarithmic_time():
    def turns(num_owners: int) -> None:
        holdings = Holdings()
        for number in range(num_owners):
            holdings.add(b"%d" % number, 1 + number)
        for number in range(num_owners):
            holdings.add(b"%d" % number, 3)
            holdings.add(holdings.largest(), -1)

    expect_linear(turns, 2_000, 16_000)
