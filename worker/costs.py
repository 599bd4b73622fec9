"""Learned cost of steps by their number of tokens."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import numpy as np
import numpy.typing as npt

WEIGHT = 0.25
"""Weight of a new measurement in an exponentially weighted mean."""

GROWTH = 2.0
"""Largest ratio by which a token count may exceed the counts that were measured."""

_FAR_BELOW = 2 / 3


class CostTable:
    """Milliseconds by token count, never decreasing with the count.

    Args:
        lean_low: Take high measurements for slow moments: if a smaller count was slower than a larger one, believe
            the larger one, and let a measurement far below the estimate replace it.
    """

    def __init__(self, *, lean_low: bool = False) -> None:
        self._lean_low = lean_low
        self._points: dict[int, tuple[float, float]] = {}
        # Sorted by tokens, milliseconds made monotone; rebuilt after each observation (some 20 buckets).
        self._tokens: list[float] = []
        self._ms: list[float] = []

    @property
    def largest(self) -> float:
        """Largest token count seen (mean of its bucket); 0 while the table is empty."""
        return self._tokens[-1] if self._tokens else 0.0

    def observe(self, num_tokens: int, milliseconds: float) -> None:
        """Add a measurement."""
        # Two buckets per power of two.
        exponent = num_tokens.bit_length()
        bucket = 2 * exponent + (num_tokens >> max(exponent - 2, 0) & 1)
        old = self._points.get(bucket)
        if old is None or (self._lean_low and milliseconds < _FAR_BELOW * old[1]):
            self._points[bucket] = (float(num_tokens), milliseconds)
        else:
            tokens, ms = old
            self._points[bucket] = (tokens + WEIGHT * (num_tokens - tokens), ms + WEIGHT * (milliseconds - ms))
        points = sorted(self._points.values())
        self._tokens = [tokens for tokens, _ in points]
        ms_by_count = [ms for _, ms in points]
        if self._lean_low:
            self._ms = list(accumulate(reversed(ms_by_count), min))[::-1]
        else:
            self._ms = list(accumulate(ms_by_count, max))

    def cost(self, num_tokens: float) -> float | None:
        """Return the milliseconds for a count, in proportion beyond the largest one seen.

        None while the table is empty.
        """
        if not self._tokens:
            return None
        index = bisect_left(self._tokens, num_tokens)
        if index == 0:
            return self._ms[0]
        if index == len(self._tokens):
            return self._ms[-1] * num_tokens / self._tokens[-1]
        share = (num_tokens - self._tokens[index - 1]) / (self._tokens[index] - self._tokens[index - 1])
        return self._ms[index - 1] + share * (self._ms[index] - self._ms[index - 1])

    def count_within(self, milliseconds: float, limit: int) -> int:
        """Return the largest count up to `limit` whose cost is within the time.

        At most twice the largest count seen.
        """
        limit = min(limit, int(self.largest * GROWTH))
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            cost = self.cost(middle)
            if cost is not None and cost <= milliseconds:
                low = middle
            else:
                high = middle - 1
        return low


_LEVEL_WEIGHT, _SHAPE_WEIGHT = 0.15, 0.05
_MAX_ERROR = 0.5
"""No measurement counts as further off, as a logarithm: durations jump on a busy machine."""


def _grid_width(num_rows: int) -> int:
    return 1 << max(num_rows.bit_length() - 4, 0)


def on_grid(num_rows: int) -> bool:
    """Return True for row counts that are measured separately: all up to 16, then 8 per octave."""
    return num_rows % _grid_width(num_rows) == 0


def next_count(num_rows: int) -> int:
    """Return the row count to measure after this one: a quarter more, on the grid."""
    least = num_rows + max(1, num_rows // 4)
    return least + -least % _grid_width(least)


class StepCosts:
    """Milliseconds of a step by its number of rows, on a machine whose speed varies.

    The logarithm of a duration is modelled as level + shape(rows). Each measurement moves the level, which follows slow
    and fast periods and growing contexts, and, with less weight, the shape at its row count. Row counts are therefore
    comparable although they were measured at different times.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._shape: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._counts: list[int] = []

    def observe(self, num_rows: int, milliseconds: float) -> None:
        """Add a measurement. Values that are not positive and finite are ignored."""
        if num_rows <= 0 or not 0.0 < milliseconds < math.inf:
            return
        num_rows -= num_rows % _grid_width(num_rows)
        log_ms = math.log(milliseconds)
        samples = self._samples[num_rows] = self._samples.get(num_rows, 0) + 1
        if samples == 1:
            if not self._shape:
                self._level = log_ms
            self._shape[num_rows] = log_ms - self._level
            self._counts = sorted(self._shape)
            return
        error = min(max(log_ms - self._level - self._shape[num_rows], -_MAX_ERROR), _MAX_ERROR)
        # A count with few samples says little about the level. Its first value is more often too high than too low.
        level_error = _LEVEL_WEIGHT * error * (1.0 if samples > 8 else 0.0)
        self._level += level_error
        weight = max(_SHAPE_WEIGHT, 1.0 / samples if error > 0.0 else 2.0 / (samples + 1))
        self._shape[num_rows] += weight * (error - level_error)

    def known_up_to(self, num_rows: int) -> int:
        """Return the row count up to which costs are known from num_rows on, without wide gaps; 0 if unknown."""
        index = bisect_left(self._counts, num_rows)
        if index == len(self._counts) or self._counts[index] > next_count(num_rows):
            return self._counts[-1] if index == len(self._counts) > 0 else 0
        known = self._counts[index]
        for count in self._counts[index + 1 :]:
            if count > next_count(known):
                break
            known = count
        return known

    def read(self, first: int, num_more: int) -> npt.NDArray[np.float64]:
        """Return the expected durations of steps with `first` to `first + num_more` rows.

        Returns:
            [num_more + 1] milliseconds. Above the largest measured row count they are proportional to the number of
            rows. All are 0 if nothing was measured.
        """
        if not self._counts:
            return np.zeros(num_more + 1)
        logs = np.array([self._shape[count] for count in self._counts])
        costs = np.maximum.accumulate(np.exp(logs + self._level))
        rows = np.arange(first, first + num_more + 1, dtype=np.float64)
        result = np.interp(rows, self._counts, costs)
        largest = self._counts[-1]
        return np.where(rows > largest, costs[-1] * rows / largest, result)
