"""Position of an output in the text that the client predicted for it.

After a difference, the position is found again by looking up the output's last tokens in an index of the prediction's
token pairs. Positions after the last certain one are preferred to earlier ones, so that added, omitted and replaced
lines are passed quickly and repeated lines are matched in order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from worker.drafting.ngram import MAX_MATCH, POSITION_BITS, as_int64_array, pair_key, sorted_pairs

_MAX_CANDIDATES = 8
"""Maximum number of compared positions in each direction."""

_MIN_AHEAD = 2
_MIN_BEHIND = 3
"""Minimum numbers of equal tokens for a position after and before the last certain one; an output seldom goes back."""

_CERTAIN = 3
"""Number of equal tokens after which a position is certain."""


class PredictionCursor:
    """Position of an output in its prediction.

    Args:
        prediction: Tokens that the client expects. If they divide the text differently than the model does, only more
            differences result.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = array("i", prediction)
        self._output = array("i")
        # Index in the prediction of the next expected token, -1 if unknown, and the number of tokens matched before it.
        self._next = 0
        self._matched = 0
        # Index after the last token whose position was certain.
        self._certain = 0
        # In the form of sorted_pairs; built when the output differs for the first time.
        self._pairs: array[int] | None = None

    def append(self, token_id: int) -> None:
        """Add a token of the output."""
        self._output.append(token_id)
        expected = self._next
        if 0 <= expected < len(self._tokens) and self._tokens[expected] == token_id:
            self._next = expected + 1
            self._matched += 1
            if self._matched >= _CERTAIN:
                self._certain = self._next
            return
        was_certain = self._matched >= _CERTAIN
        self._next, self._matched = -1, 0
        self._find()
        if self._next < 0 and was_certain:
            # The kind of difference is not known yet; most often one token was replaced.
            self._next = expected + 1

    def propose(self, max_tokens: int) -> tuple[list[int], int]:
        """Return the next predicted tokens, and the number of consecutive output tokens before them that matched."""
        if self._next < 0 or max_tokens <= 0:
            return [], 0
        return self._tokens[self._next : self._next + max_tokens].tolist(), self._matched

    def _find(self) -> None:
        """Find the longest match of the output's end in the prediction; of equal ones, the nearest ahead."""
        if len(self._output) < _MIN_AHEAD or len(self._tokens) < _MIN_AHEAD:
            return
        if self._pairs is None:
            self._pairs = as_int64_array(sorted_pairs(self._tokens))
        pairs = self._pairs
        base = pair_key(self._output[-2], self._output[-1]) << POSITION_BITS
        middle = bisect_left(pairs, base | self._certain)
        best = _MIN_AHEAD - 1
        for index in range(middle, min(middle + _MAX_CANDIDATES, len(pairs))):
            position = pairs[index] - base
            if position >> POSITION_BITS:
                break
            best = self._try(position, best)
        best = max(best, _MIN_BEHIND - 1)
        for index in range(middle - 1, max(middle - 1 - _MAX_CANDIDATES, -1), -1):
            position = pairs[index] - base
            if position < 0:
                break
            best = self._try(position, best)

    def _try(self, position: int, best: int) -> int:
        """Move to `position` if the match that ends there is longer than `best`; return the longer length."""
        tokens, output = self._tokens, self._output
        end = len(output) - 1
        if position < best or end < best or tokens[position - best] != output[end - best]:
            return best
        most = min(MAX_MATCH, position + 1, end + 1)
        length = 0
        while length < most and tokens[position - length] == output[end - length]:
            length += 1
        if length <= best:
            return best
        self._next, self._matched = position + 1, length
        if length >= _CERTAIN:
            self._certain = position + 1
        return length
