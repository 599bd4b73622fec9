"""Looking for drafts takes the host time in each step; where they bring less than that, it is left out for a while."""

from __future__ import annotations

_WEIGHT = 0.05
_BELIEVED = 0.5
"""Part of the expected gain that counts: estimates err towards hope, since the best of many is taken."""

LONGEST = 16
"""Steps, and so what it takes at most until a change of the machine or of the texts is noticed."""

_OTHER_LOAD = 0.25
"""Change of the number of requests, as a share of it, with which what was learned no longer holds."""

_SHORTER = 4
"""By how much the pauses are shorter after that."""


class Pause:
    """Weighs what drafts save against what looking for them takes, over all requests of a worker.

    Args:
        longest_each: steps that are left out at a time at most for each request, where that is more than LONGEST: what
            looking takes grows with them.
    """

    def __init__(self, longest_each: int = 0) -> None:
        self._longest_each = longest_each
        self._step_ms = 0.0
        self._balance_ms = 0.0
        self._length = 1
        self._left = 0
        self._num_requests = 0

    @property
    def is_on(self) -> bool:
        """Whether the next step, if as many requests run, is one to be left out."""
        return self._left > 0

    @property
    def _longest(self) -> int:
        return max(LONGEST, self._longest_each * self._num_requests)

    @property
    def is_long(self) -> bool:
        """Whether nothing has paid for long, nor at the one look after the number of requests changed."""
        return self._length > self._longest // _SHORTER

    def holds(self, num_requests: int) -> bool:
        """Whether the next step, of so many requests, shall do without drafts. Called once a step."""
        if not self._left:
            self._num_requests = num_requests
            return False
        if abs(num_requests - self._num_requests) > _OTHER_LOAD * self._num_requests:
            self._num_requests = num_requests
            # One look at once; where it is for nothing again, not as many as for texts of which nothing is known.
            self._left = 0
            self._length = max(self._length // _SHORTER, 1)
            return False
        self._left -= 1
        return True

    def observe(self, step_ms: float) -> None:
        """What a step took."""
        self._step_ms += _WEIGHT * (step_ms - self._step_ms) if self._step_ms else step_ms

    def learn(self, gain: float, looking_ms: float) -> None:
        """A step was looked at.

        Args:
            gain: by how much faster than without drafts it is expected to be, as a share.
        """
        if not self._step_ms:
            return
        saved_ms = _BELIEVED * gain * self._step_ms - looking_ms
        self._balance_ms += _WEIGHT * (saved_ms - self._balance_ms)
        if saved_ms > 0.0 or self._balance_ms >= 0.0:
            self._length = 1
        if self._balance_ms >= 0.0:
            return
        self._left = self._length
        self._length = min(2 * self._length, self._longest)
