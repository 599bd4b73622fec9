"""Acceptance of drafts by kind: over all requests of a worker, and of one request lately."""

from __future__ import annotations

from worker.drafting.proposal import Source

_FIRST_CHANCES = {Source.PREDICTION: 0.7, Source.LOOKUP: 0.3, Source.REPETITION: 0.7, Source.DRAFT_MODEL: 0.5}
_FIRST_TRIALS = 12.0
_PRIOR_TRIALS = 3.0
"""Weight of the estimate over all requests, in observations of the request itself."""

_WORKER_DECAY, _REQUEST_DECAY = 0.998, 0.9
_LEAST, _MOST = 0.01, 0.99


class Acceptance:
    """Exponentially weighted acceptance of each kind of draft, over all requests of a worker."""

    def __init__(self) -> None:
        self.chances = [_FIRST_CHANCES[source] for source in Source]
        self._trials = [_FIRST_TRIALS] * len(Source)

    def observe(self, source: int, accepted: bool) -> None:
        """Record whether a draft was accepted whose predecessors in the proposal were accepted."""
        trials = self._trials[source] = self._trials[source] * _WORKER_DECAY + 1.0
        self.chances[source] += (accepted - self.chances[source]) / trials


class RequestAcceptance:
    """Acceptance of each kind of draft in one request.

    About ten observations decide, so that a text that becomes predictable, or stops to be, is noticed soon.
    """

    def __init__(self, worker: Acceptance) -> None:
        self._worker = worker
        self._accepted = [0.0] * len(Source)
        self._tried = [0.0] * len(Source)

    def observe(self, source: int, accepted: bool) -> None:
        """Record an observation here and for the worker."""
        self._worker.observe(source, accepted)
        self._accepted[source] = self._accepted[source] * _REQUEST_DECAY + accepted
        self._tried[source] = self._tried[source] * _REQUEST_DECAY + 1.0

    def chance(self, source: int) -> float:
        """Return the estimated chance that a draft is accepted if those before it are."""
        hits = self._accepted[source] + _PRIOR_TRIALS * self._worker.chances[source]
        return min(max(hits / (self._tried[source] + _PRIOR_TRIALS), _LEAST), _MOST)

    def recent(self) -> float:
        """Return the recent share of accepted drafts of the best kind; 0 before the first observation."""
        return max((hits / tried for hits, tried in zip(self._accepted, self._tried) if tried), default=0.0)
