"""Proposals: tokens that may follow a text, and their source."""

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
