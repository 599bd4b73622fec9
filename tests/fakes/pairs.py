"""Selection of test cases from all combinations of values. All other combinations are marked as slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Ids = Callable[[Any], object] | None
"""Function that returns the name of a value; see pytest.mark.parametrize."""


def each_value(ids: Ids = None, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with the fewest cases that contain each value of each parameter."""
    sizes = [len(options) for options in values.values()]
    return _parametrize(values, [tuple(number % size for size in sizes) for number in range(max(sizes))], ids)


def pairwise(ids: Ids = None, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with few cases that contain each pair of values of two parameters."""
    cases = list(product(*(range(len(options)) for options in values.values())))
    uncovered = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    chosen = []
    while uncovered:
        best = max(cases, key=lambda case: len(uncovered.intersection(combinations(enumerate(case), 2))))
        chosen.append(best)
        uncovered.difference_update(combinations(enumerate(best), 2))
    return _parametrize(values, chosen, ids)


def some(cases: Sequence[Any], *quick: int) -> list[Any]:
    """Return the cases, all marked as slow except those with the indices `quick`."""
    return [case if index in quick else slow(case) for index, case in enumerate(cases)]


def slow(*values: Any) -> Any:
    """Return a slow case with these values."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _parametrize(values: dict[str, Sequence[Any]], chosen: Iterable[tuple[int, ...]], ids: Ids) -> pytest.MarkDecorator:
    quick = set(chosen)
    params = [
        (pytest.param if case in quick else slow)(*(options[index] for options, index in zip(values.values(), case)))
        for case in product(*(range(len(options)) for options in values.values()))
    ]
    return pytest.mark.parametrize(tuple(values), params, ids=ids)
