"""Budget of a model's reasoning, as a small automaton over token ids."""

from __future__ import annotations

from collections.abc import Sequence

from shared.sampling_params import ThinkingBudget

UNBOUNDED = 1 << 30


class ThinkingAutomaton:
    """State of one text in its reasoning, and the token that must follow once the budget is used up.

    The budget covers all reasoning of a text: a model that opens it again continues with the rest. A token counts if
    the text is inside the reasoning before it and the token does not complete the end mark.

    Args:
        budget: The budget.
        emitted: Tokens generated already.
    """

    def __init__(self, budget: ThinkingBudget, emitted: Sequence[int] = ()) -> None:
        self._end_ids = budget.end_ids
        self._start = _Finder(budget.start_ids)
        self._end = _Finder(budget.end_ids)
        self._inside = budget.open
        self._num_left = budget.max_tokens
        self._dropped = False
        for token_id in emitted:
            self.advance(token_id)

    @property
    def forced(self) -> int | None:
        """Token that must follow when the budget is used up: the next one of the end mark; None for no such token."""
        if self._dropped or not self._inside or self._num_left:
            return None
        return self._end_ids[self._end.num_matched]

    @property
    def num_free(self) -> int:
        """Number of arbitrary tokens that may follow before one might have to be forced."""
        if self._dropped:
            return UNBOUNDED
        if self._inside:
            return self._num_left
        return UNBOUNDED if not self._start.num_tokens else self._start.num_missing + self._num_left

    def advance(self, token_id: int) -> None:
        """Take the next token of the text."""
        if not self._inside:
            if self._start.advance(token_id):
                self._inside = True
        elif self._end.advance(token_id):
            self._inside = False
        elif self._num_left:
            self._num_left -= 1

    def drop(self) -> None:
        """Drop the budget."""
        self._dropped = True


class _Finder:
    """Search for a sequence of tokens, at most 64, in a stream."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self.num_matched = 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_missing(self) -> int:
        return len(self._tokens) - self.num_matched

    def advance(self, token: int) -> bool:
        """Take a token; return True if the sequence ends with it. The search then starts again."""
        tail = (*self._tokens[: self.num_matched], token)
        # Find the longest prefix of the sequence that the text ends with.
        lengths = range(min(len(tail), len(self._tokens)), 0, -1)
        self.num_matched = next((n for n in lengths if tail[-n:] == self._tokens[:n]), 0)
        if not self._tokens or self.num_matched < len(self._tokens):
            return False
        self.num_matched = 0
        return True
