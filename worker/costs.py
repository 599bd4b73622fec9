"""Learned cost of steps by their number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

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
