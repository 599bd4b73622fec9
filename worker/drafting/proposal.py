"""What may come next in a text, and where the guess is from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Source(enum.IntEnum):
    """Who proposed; the values are indices of tables."""

    PREDICTION = 0
    LOOKUP = 1
    DRAFT_MODEL = 2


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow the last known one of a request.

    Attributes:
        token_ids: at least one.
        source: where they are from.
        chances: for each token the estimated chance, 0 to 1, that it is accepted given that those before it were.
    """

    token_ids: Sequence[int]
    source: Source
    chances: Sequence[float]

    @property
    def expected(self) -> float:
        """How many of the tokens are expected to be accepted."""
        total, reached = 0.0, 1.0
        for chance in self.chances:
            reached *= chance
            total += reached
        return total

    def first(self, count: int) -> Proposal | None:
        """The first `count` tokens of it; None for none."""
        if count >= len(self.token_ids):
            return self
        return Proposal(self.token_ids[:count], self.source, self.chances[:count]) if count > 0 else None
