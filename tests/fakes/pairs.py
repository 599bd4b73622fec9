"""Choice of test cases that combine each pair of values, instead of all combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(ids: Callable[[Any], object] | None = None, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that each two values of two parameters occur together; other combinations are slow.

    Args:
        ids: Function that returns the name of a value; see pytest.mark.parametrize.
        values: The values of each parameter.
    """
    cases = list(product(*(range(len(options)) for options in values.values())))
    uncovered = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    quick = set()
    while uncovered:
        best = max(cases, key=lambda case: len(uncovered.intersection(combinations(enumerate(case), 2))))
        quick.add(best)
        uncovered.difference_update(combinations(enumerate(best), 2))
    params = [
        pytest.param(
            *(options[index] for options, index in zip(values.values(), case)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
    return pytest.mark.parametrize(tuple(values), params, ids=ids)
