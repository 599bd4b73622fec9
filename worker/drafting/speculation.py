"""Drafts for one request, and their acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import DraftCounts
from worker.drafting.ngram import NgramIndex
from worker.drafting.policy import FORGIVEN, MAX_CREDIT, Pause
from worker.drafting.prediction import PredictionCursor
from worker.drafting.proposal import Acceptance, Proposal, Source

_TRUSTED = 0.6
"""Chance from which the client's prediction is followed without a look-up."""

_LONG_MATCH = 6
"""Tokens of a match from which a look-up counts as REPETITION."""

_PROMISING = 0.3
_FIRST_LOOK, _LAST_LOOK = 16, 512
"""Tokens after which a text whose proposals were wrong is tried again; the gap doubles, because each try waits for
values of the step in flight."""

_MANY_WRONG, _WRONG_PER_TOKEN = 128, 0.5
"""Wrong drafts (in total, and per generated token) from which drafts under a grammar stop. Each wrong draft leaves
states in the grammar's lexer, and a text whose lexer has too many fails: with seven per token there were 2,500 states
after 100 tokens instead of 805."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Tokens after the first `num_known` of a text that the draft model proposed and has computed.

    Attributes:
        life: Life of the request whose pages hold them.
        num_known: Number of known tokens before them.
        token_ids: The tokens.
    """

    life: int
    num_known: int
    token_ids: Sequence[int]


class Speculation:
    """Drafts for one choice of a request.

    Acceptance is learned from all tokens that arrive, whether drafts were verified or not. From each source one
    proposal is compared with the text up to its first difference, then the next one. A text that becomes predictable is
    therefore noticed although nothing is verified for it.

    The text grows elsewhere. Its new tokens are processed on request, so that steps without drafts touch nothing here.

    Args:
        token_ids: Prompt and generated tokens; may grow at the end.
        num_prompt_tokens: Number of prompt tokens.
        prediction: Output that the client expects; may be empty.
        look_up: Look up the end of the text in the text.
        acceptance: Acceptance over all requests of the worker.
        pauses: Pauses of the worker; nothing is drafted while all of them are on.

    Attributes:
        num_drafted: Number of verified drafts.
        num_accepted: Number of accepted drafts.
        is_suspect: A step with its drafts computed nothing usable, so drafting has ended; set by the scheduler.
        read_ahead: Part of its own last proposal that the draft model has computed; kept by the speculator.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        prediction: Sequence[int],
        *,
        look_up: bool,
        acceptance: Acceptance,
        pauses: Sequence[Pause] = (),
    ) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self.is_suspect = False
        self.read_ahead: ReadAhead | None = None
        self._credit = 0.0
        self._pauses = pauses
        self._num_output = 0
        self._next_look = 0
        self._look_gap = _FIRST_LOOK
        self._token_ids = token_ids
        self._look_up = look_up
        self._acceptance = Acceptance(acceptance)
        self._cursor = PredictionCursor(prediction) if len(prediction) else None
        self._index: NgramIndex | None = None  # made at the first proposal
        self._num_learned = len(token_ids)
        self._num_read = num_prompt_tokens
        self._drafted: Sequence[int] = ()
        # For each source the proposal that is compared with the text, and the number of equal tokens so far.
        self._followed: dict[Source, tuple[Sequence[int], int]] = {}

    def _catch_up(self) -> None:
        """Learn from the tokens that have arrived."""
        new_ids = self._token_ids[self._num_learned :]
        if not new_ids:
            return
        self._num_learned += len(new_ids)
        self._num_output += len(new_ids)
        self._drafted = ()
        if self._credit < 0.0:
            self._credit = min(self._credit + FORGIVEN * len(new_ids), 0.0)
        for token_id in new_ids:
            for source, (proposed, place) in list(self._followed.items()):
                accepted = proposed[place] == token_id
                self._acceptance.observe(source, accepted)
                if accepted and place + 1 < len(proposed):
                    self._followed[source] = proposed, place + 1
                else:
                    del self._followed[source]

    @property
    def credit(self) -> float:
        """Tokens by which drafts, its own and those of others, have put the request ahead."""
        self._catch_up()
        return self._credit

    @property
    def is_promising(self) -> bool:
        """True if the request should wait for tokens in flight to draft their continuation."""
        if self.is_suspect or (self._pauses and all(pause.is_on for pause in self._pauses)):
            return False
        self._catch_up()
        return self._num_output >= self._next_look or self._acceptance.recent() > _PROMISING

    @property
    def is_often_wrong(self) -> bool:
        """True if drafts should not be verified under a grammar for now."""
        self._catch_up()
        return self.num_drafted - self.num_accepted > _MANY_WRONG + _WRONG_PER_TOKEN * self._num_output

    def propose(self, limit: int) -> Proposal | None:
        """Return up to `limit` tokens that may follow the last token.

        The draft model's proposal has precedence; the model runs only for requests without another proposal. Next is
        the client's prediction, unless it is doubtful and a look-up is more likely, and then a look-up.
        """
        if limit <= 0:
            return None
        self._catch_up()
        if self._num_output >= self._next_look:
            self._next_look = self._num_output + self._look_gap
            self._look_gap = min(2 * self._look_gap, _LAST_LOOK)
        if self._drafted:
            return self._proposal(Source.DRAFT_MODEL, self._drafted[:limit])
        self._read()
        predicted = None
        if self._cursor is not None:
            predicted = self._proposal(Source.PREDICTION, self._cursor.propose(limit)[0])
            if predicted is not None and predicted.chance >= _TRUSTED:
                return predicted
        if self._index is not None:
            token_ids, num_matched = self._index.propose(limit)
            found = self._proposal(Source.REPETITION if num_matched >= _LONG_MATCH else Source.LOOKUP, token_ids)
            if found is not None and (predicted is None or found.chance > predicted.chance):
                return found
        return predicted

    def set_drafted(self, token_ids: Sequence[int]) -> None:
        """Store the draft model's proposal after the last token; it is dropped when a token arrives."""
        self._catch_up()
        self._drafted = token_ids

    def draft_chance(self) -> float:
        """Return the estimated chance of a token of the draft model."""
        self._catch_up()
        return self._acceptance.chance(Source.DRAFT_MODEL)

    def charge(self, num_tokens: float) -> None:
        """Add tokens that a step gains beyond one, or that waiting costs, to the credit."""
        self._catch_up()
        self._credit = min(max(self._credit + num_tokens, -MAX_CREDIT), MAX_CREDIT)

    def resolve(self, num_verified: int, num_accepted: int) -> None:
        """Count a verification."""
        self.num_drafted += num_verified
        self.num_accepted += num_accepted

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Numbers of accepted and rejected drafts, for the client; None before the first verification."""
        return None if not self.num_drafted else DraftCounts(self.num_accepted, self.num_drafted - self.num_accepted)

    def _read(self) -> None:
        """Add the new tokens to the index and to the cursor."""
        new_ids = self._token_ids[self._num_read :]
        if self._look_up and self._index is None:
            self._index = NgramIndex(self._token_ids)
        elif self._index is not None:
            for token_id in new_ids:
                self._index.append(token_id)
        if self._cursor is not None:
            for token_id in new_ids:
                self._cursor.append(token_id)
        self._num_read += len(new_ids)

    def _proposal(self, source: Source, token_ids: Sequence[int]) -> Proposal | None:
        if not token_ids:
            return None
        if self._followed.get(source, ((), 0))[1] == 0:
            self._followed[source] = token_ids, 0
        return Proposal(token_ids, source, self._acceptance.chance(source))
