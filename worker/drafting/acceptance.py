"""How often proposed tokens are accepted: over all requests, and of each request lately.

What tells most about a token's chance is not its place in the proposal but the evidence for it. For look-ups and
predictions that is how many tokens before it came as the same place says (one at place j has those of the match and j
more, given that it is reached), for a draft model the probability that it gave the token. Evidence is put in grades,
and each source has one acceptance per grade. By place acceptance is kept too, for what is not proposed yet.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from worker.drafting.proposal import Source

MAX_PLACES = 16
"""Places in a proposal that are told apart; later ones count as the last."""

_MATCH_BOUNDS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_PROBABILITY_BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_GRADE_OF_MATCH = tuple(bisect_right(_MATCH_BOUNDS, length) for length in range(32 + 2 * MAX_PLACES))
_LONGEST = 32
_MATCH_GRADES = (0.5, 0.35, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.85, 0.9, 0.93)
_FIRST_CHANCES = {
    Source.PREDICTION: _MATCH_GRADES,
    Source.LOOKUP: (0.1, 0.15, 0.3, 0.4, 0.45, 0.5, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9),
    Source.DRAFT_MODEL: (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.75, 0.85, 0.93),
}
"""Guesses before anything was seen, worth some observations."""

_FIRST_TRIALS = 12.0
_PRIOR_TRIALS = 3.0
"""What all requests together are worth beside a request's own observations of the same grade."""

_WORKER_DECAY = 0.998
_REQUEST_DECAY = 0.9
_LEAST, _MOST = 0.01, 0.99
_TYPICAL = 0.6


def match_grades(matched: int, count: int) -> Sequence[int]:
    """Grades of `count` tokens (at most MAX_PLACES) that follow a match of so many."""
    matched = min(matched, _LONGEST)
    return _GRADE_OF_MATCH[matched : matched + count]


def probability_grades(probabilities: Sequence[float]) -> Sequence[int]:
    """Grades of tokens that a draft model gave these probabilities; what is not a number is as good as none."""
    return [bisect_right(_PROBABILITY_BOUNDS, p) if math.isfinite(p) else 0 for p in probabilities]


class Acceptance:
    """Of all requests of a worker; what a new request is expected to be like."""

    def __init__(self) -> None:
        self.by_grade = [list(_FIRST_CHANCES[source]) for source in Source]
        self._trials = [[_FIRST_TRIALS] * len(chances) for chances in self.by_grade]
        self._by_place = [[_TYPICAL] * MAX_PLACES for _ in Source]
        self._place_trials = [[_FIRST_TRIALS] * MAX_PLACES for _ in Source]

    def observe(self, source: int, place: int, grade: int, accepted: bool) -> None:
        """A proposed token whose predecessors in the proposal were all accepted was accepted, or not."""
        _learn(self.by_grade[source], self._trials[source], grade, accepted)
        _learn(self._by_place[source], self._place_trials[source], min(place, MAX_PLACES - 1), accepted)

    def by_place(self, source: Source, count: int) -> list[float]:
        """For each of the first `count` places the chance, given that those before are accepted."""
        chances = self._by_place[source]
        return [chances[min(place, MAX_PLACES - 1)] for place in range(count)]


class RequestAcceptance:
    """Of one request: exponentially weighted counts by grade, beside what all requests show.

    Some ten observations decide, so a text that turns predictable, or stops to be, is noticed as fast.
    """

    def __init__(self, worker: Acceptance) -> None:
        self._worker = worker
        # By source and grade: accepted and tried, weighted; and the chance that they make, below 0: nothing seen.
        self._accepted = [[0.0] * len(chances) for chances in worker.by_grade]
        self._tried = [[0.0] * len(chances) for chances in worker.by_grade]
        self._chances = [[-1.0] * len(chances) for chances in worker.by_grade]
        self._all_accepted = [0.0] * len(Source)
        self._all_tried = [0.0] * len(Source)

    def observe(self, source: int, place: int, grade: int, accepted: bool) -> None:
        """As Acceptance.observe, which is told too."""
        self._worker.observe(source, place, grade, accepted)
        tried = self._tried[source][grade] = self._tried[source][grade] * _REQUEST_DECAY + 1.0
        hits = self._accepted[source][grade] = self._accepted[source][grade] * _REQUEST_DECAY + accepted
        prior = self._worker.by_grade[source][grade]
        chance = (hits + _PRIOR_TRIALS * prior) / (tried + _PRIOR_TRIALS)
        self._chances[source][grade] = min(max(chance, _LEAST), _MOST)
        self._all_accepted[source] = self._all_accepted[source] * _REQUEST_DECAY + accepted
        self._all_tried[source] = self._all_tried[source] * _REQUEST_DECAY + 1.0

    def chances(self, source: Source, grades: Sequence[int]) -> list[float]:
        """Of tokens of these grades, one after the other."""
        own, prior = self._chances[source], self._worker.by_grade[source]
        return [own[grade] if own[grade] >= 0.0 else prior[grade] for grade in grades]

    def recent(self) -> float:
        """Of what the best source proposed lately, the share that came; 0 before the first."""
        shares = [hits / tried for hits, tried in zip(self._all_accepted, self._all_tried) if tried]
        return max(shares, default=0.0)

    def by_place(self, source: Source, count: int) -> list[float]:
        """What Acceptance.by_place says, moved towards what this request showed lately from that source."""
        usual = self._worker.by_place(source, count)
        tried = self._all_tried[source]
        if not tried or not usual:
            return usual
        mean = sum(usual) / len(usual)
        own = (self._all_accepted[source] + _PRIOR_TRIALS * mean) / (tried + _PRIOR_TRIALS)
        return [min(max(chance * own / mean, _LEAST), _MOST) for chance in usual]


def _learn(chances: list[float], trials: list[float], index: int, accepted: bool) -> None:
    """Exponentially weighted mean whose first observations weigh more; kept within what is plausible."""
    tried = trials[index] = trials[index] * _WORKER_DECAY + 1.0
    chance = chances[index] + (accepted - chances[index]) / tried
    chances[index] = min(max(chance, _LEAST), _MOST)
