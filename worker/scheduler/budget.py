"""How many prompt tokens a step may carry, from a cost table that is learned while serving.

A step's time is modelled as decode(d) + prompt(p): what d decoding rows take alone, plus what p prompt tokens beside
them add. Both tables are exponentially weighted means over buckets of the token count, read by interpolation.
"""

from __future__ import annotations

from bisect import bisect_left

MIN_CHUNK = 8
"""Prompt tokens that a step takes whatever it costs, so that prompts always progress."""

MAX_STRETCH = 2.5
"""A step with prompt tokens is meant to last at most this many times one without: streams keep their rhythm. Noise,
and attention that grows dearer along a prompt, carry steps beyond it; the distance to 4 is for them."""

MIN_STRETCH = 2.0
"""Where decoding alone comes near target_step_ms (many rows, a slow or busy machine), prompts still get as much time as
the decoding rows: with less they would starve, and new requests wait for ever."""

_WEIGHT = 0.25
_GROWTH = 2.0


class CostTable:
    """Token count -> milliseconds."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        # Sorted by tokens, milliseconds made monotone; rebuilt after each observation (some 20 buckets).
        self._tokens: list[float] = []
        self._ms: list[float] = []

    @property
    def largest(self) -> float:
        """The largest token count seen (mean of its bucket); 0 while the table is empty."""
        return self._tokens[-1] if self._tokens else 0.0

    def observe(self, num_tokens: int, milliseconds: float) -> None:
        """One more measurement."""
        # Two buckets per power of two.
        exponent = num_tokens.bit_length()
        bucket = 2 * exponent + (num_tokens >> max(exponent - 2, 0) & 1)
        old = self._points.get(bucket)
        if old is None:
            self._points[bucket] = (float(num_tokens), milliseconds)
        else:
            tokens, ms = old
            self._points[bucket] = (tokens + _WEIGHT * (num_tokens - tokens), ms + _WEIGHT * (milliseconds - ms))
        points = sorted(self._points.values())
        self._tokens = [tokens for tokens, _ in points]
        self._ms = []
        for _, ms in points:
            self._ms.append(max(ms, self._ms[-1]) if self._ms else ms)

    def cost(self, num_tokens: float) -> float | None:
        """Milliseconds for a count; beyond the largest seen in proportion to it. None while the table is empty."""
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
        """The largest count up to `limit` whose cost is within the time; at most twice what was seen before."""
        limit = min(limit, int(self.largest * _GROWTH))
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            cost = self.cost(middle)
            if cost is not None and cost <= milliseconds:
                low = middle
            else:
                high = middle - 1
        return low


class StepBudget:
    """Splits a step between decoding rows and prompt tokens.

    Args:
        target_ms: milliseconds that a step with decoding rows may take, between MIN_STRETCH and MAX_STRETCH times
            what the decoding rows take alone.
        max_tokens: most tokens in a step.
    """

    def __init__(self, *, target_ms: float, max_tokens: int) -> None:
        self.target_ms = target_ms
        self._max_tokens = max_tokens
        self._decode = CostTable()
        self._prompt = CostTable()
        self._prefill_rate = 0.0
        self._probed = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Speed at which prompts were read lately; 0 while unknown."""
        return self._prefill_rate

    def observe(self, num_decode: int, num_prompt: int, milliseconds: float) -> None:
        """What a step of so many decoding rows and prompt tokens took."""
        if num_prompt == 0:
            if num_decode:
                self._decode.observe(num_decode, milliseconds)
            return
        if num_prompt >= MIN_CHUNK and milliseconds > 0:
            rate = num_prompt * 1000.0 / milliseconds
            self._prefill_rate += (_WEIGHT if self._prefill_rate else 1.0) * (rate - self._prefill_rate)
        alone = self._decode.cost(num_decode) if num_decode else None
        if alone is not None:
            # A step without decoding rows also reads the weights, which rows beside the prompt share: not comparable.
            self._prompt.observe(num_prompt, max(milliseconds - alone, 0.0))

    def prompt_tokens(self, num_decode: int) -> int:
        """Prompt tokens that a step with num_decode decoding rows may take, at least 1 where the step has room.

        Except once for each doubling of the decoding rows: that step goes without, to learn what so many take alone.
        """
        room = self._max_tokens - num_decode
        if num_decode == 0 or room <= MIN_CHUNK:
            return room
        if num_decode >= _GROWTH * max(self._decode.largest, self._probed):
            self._probed = num_decode
            return 0
        alone = self._decode.cost(num_decode)
        if alone is None:
            return min(room, 2 * MIN_CHUNK)
        limit_ms = min(max(self.target_ms, MIN_STRETCH * alone), MAX_STRETCH * alone)
        return min(room, max(MIN_CHUNK, self._prompt.count_within(limit_ms - alone, room)))
