"""Proposals of tokens that may follow a text, and how often they are accepted."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Source(enum.IntEnum):
    """Kind of a draft; the values are indices of tables.

    LOOKUP and REPETITION are found by looking up the end of the text in the text; a REPETITION follows a long match.
    """

    PREDICTION = 0
    LOOKUP = 1
    REPETITION = 2
    DRAFT_MODEL = 3


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow the last known one of a request.

    Attributes:
        token_ids: At least one token.
        source: Kind of the drafts.
        chance: Estimated chance, 0 to 1, that a token is accepted if those before it are.
    """

    token_ids: Sequence[int]
    source: Source
    chance: float

    @property
    def expected(self) -> float:
        """Expected number of accepted tokens."""
        return sum(self.chance**place for place in range(1, len(self.token_ids) + 1))

    def first(self, count: int) -> Proposal | None:
        """Return the first `count` tokens; None for none."""
        if count >= len(self.token_ids):
            return self
        return Proposal(self.token_ids[:count], self.source, self.chance) if count > 0 else None


_FIRST_CHANCES = {Source.PREDICTION: 0.7, Source.LOOKUP: 0.3, Source.REPETITION: 0.7, Source.DRAFT_MODEL: 0.5}
"""Acceptance of each kind of draft that a worker assumes before its first observation."""
_WORKER_DECAY, _WORKER_PRIOR = 0.998, 12.0
_REQUEST_DECAY, _REQUEST_PRIOR = 0.9, 3.0
"""Decay of the weights per observation, and weight of the prior estimate as a number of observations."""


class Acceptance:
    """Exponentially weighted acceptance of each kind of draft: of a worker, or of one request.

    The estimate of a request depends on about its last ten observations, so that it follows changes of the text.

    Args:
        worker: For a request, the acceptance over all requests, which is the estimate before its own observations.
    """

    def __init__(self, worker: Acceptance | None = None) -> None:
        self._worker = worker
        self._decay, self._prior = (_REQUEST_DECAY, _REQUEST_PRIOR) if worker else (_WORKER_DECAY, _WORKER_PRIOR)
        self._accepted = [0.0] * len(Source)
        self._tried = [0.0] * len(Source)

    def observe(self, source: int, accepted: bool) -> None:
        """Record whether a draft was accepted after all drafts before it. The worker's estimate is updated too."""
        if self._worker is not None:
            self._worker.observe(source, accepted)
        self._accepted[source] = self._accepted[source] * self._decay + accepted
        self._tried[source] = self._tried[source] * self._decay + 1.0

    def chance(self, source: int) -> float:
        """Return the estimated chance, 0.01 to 0.99, that a draft is accepted if those before it are."""
        prior = _FIRST_CHANCES[Source(source)] if self._worker is None else self._worker.chance(source)
        chance = (self._accepted[source] + self._prior * prior) / (self._tried[source] + self._prior)
        return min(max(chance, 0.01), 0.99)

    def recent(self) -> float:
        """Return the recent share of accepted drafts of the best kind; 0 before the first observation."""
        return max((hits / tried for hits, tried in zip(self._accepted, self._tried) if tried), default=0.0)
