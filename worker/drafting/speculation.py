"""What is proposed for one request, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import DraftCounts
from worker.drafting.acceptance import MAX_PLACES, Acceptance, RequestAcceptance, match_grades, probability_grades
from worker.drafting.ngram import NgramIndex
from worker.drafting.pause import Pause
from worker.drafting.prediction import PredictionCursor
from worker.drafting.proposal import Proposal, Source

_TRUSTED = 0.6
"""Chance of its first token from which the client's prediction is followed without a look-up beside it."""

_MOST_CREDIT = 8.0
"""Tokens: what was gained long ago does not make up for a slow moment."""

_FORGIVEN = 0.02
"""Tokens of a debt that are forgotten with each token: so much slower a request may become for the sake of others and
of trials, of which the first would else be the last."""

_PROMISING = 0.3
_FIRST_LOOK, _LAST_LOOK = 16, 512
"""Tokens after which a text whose proposals were wrong is looked at again: the gap doubles each time, since waiting for
values costs a request a step."""

_MANY_WRONG, _WRONG_EACH = 128, 0.5
"""Verified drafts that were wrong, beside so many with each token, after which a grammar's lexer is spared: the mask
after each leaves it states that the text alone would not have made, and a text whose lexer has too many fails. With
seven at each token 2,500 states were there after 100 tokens in place of 805."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Tokens that the draft model proposed after the first `num_known` of a text, and has read itself.

    Attributes:
        life: of the request's lives the one whose pages hold it.
    """

    life: int
    num_known: int
    token_ids: Sequence[int]


class _Followed:
    """A proposal that is compared with the tokens that arrive, whether or not it was verified."""

    __slots__ = ("grades", "place", "token_ids")

    def __init__(self, token_ids: Sequence[int], grades: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.grades = grades
        self.place = 0


class Speculation:
    """Drafts for one choice of a request.

    How often they are accepted is learned from the tokens that arrive, verified or not: what comes next is the
    same either way. So a request for which nothing is verified because its text cannot be foreseen shows by itself
    when that changes. From each source one proposal is followed to its first difference, then the next one.

    The text grows elsewhere, and its new tokens are learned from when somebody asks. A step that has streamed the
    model's weights leaves nothing of this in the processor's caches, so that looking at 16 texts takes nearly as long
    for one token as for a dozen, and while nothing is drafted nobody asks in each step.

    Args:
        token_ids: prompt and what was generated so far. It may grow at its end; only read.
        num_prompt_tokens: how many of them are prompt.
        prediction: what the client expects the output to be; may be empty.
        look_up: whether the end of the text is looked up in the text.
        acceptance: of all requests of the worker.
        pauses: of the worker; while all of them are on nothing is drafted.

    Attributes:
        num_drafted, num_accepted: tokens that were verified, and those of them that are in the output.
        is_suspect: with its drafts a step computed nothing usable, so there are no more; set by the scheduler.
        read_ahead: what the draft model has read of its own last proposal; kept by the speculator.
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
        self._acceptance = RequestAcceptance(acceptance)
        self._cursor = PredictionCursor(prediction) if len(prediction) else None
        # How much of the text was learned from, and of the output is in the cursor, and in the index once that is made:
        # at the first propose.
        self._num_learned = len(token_ids)
        self._num_read = num_prompt_tokens
        self._index: NgramIndex | None = None
        self._drafted: tuple[Sequence[int], Sequence[int]] | None = None
        self._followed: list[_Followed | None] = [None] * len(Source)

    def _catch_up(self) -> None:
        """Learns from the tokens that have come."""
        news = self._token_ids[self._num_learned :]
        if not news:
            return
        self._num_learned += len(news)
        self._num_output += len(news)
        self._drafted = None
        if self._credit < 0.0:
            self._credit = min(self._credit + _FORGIVEN * len(news), 0.0)
        for source, followed in enumerate(self._followed):
            if followed is not None and self._follow(source, followed, news):
                self._followed[source] = None

    def _follow(self, source: int, followed: _Followed, news: Sequence[int]) -> bool:
        """Whether the proposal has come to its end, or to its first difference."""
        for token_id in news:
            place = followed.place
            came = followed.token_ids[place] == token_id
            self._acceptance.observe(source, place, followed.grades[place], came)
            followed.place = place + 1
            if not came or followed.place == len(followed.token_ids):
                return True
        return False

    @property
    def credit(self) -> float:
        """By how many tokens drafts, its own and those of others, have put it ahead of where it would be without."""
        self._catch_up()
        return self._credit

    @property
    def is_promising(self) -> bool:
        """Whether to wait for tokens in flight, to draft what follows them: proposals were right lately, or it is time
        to look whether they would be."""
        if self.is_suspect or (self._pauses and all(pause.is_on for pause in self._pauses)):
            return False
        self._catch_up()
        return self._num_output >= self._next_look or self._acceptance.recent() > _PROMISING

    @property
    def is_often_wrong(self) -> bool:
        """Whether drafts of this text should not be verified under a grammar for now."""
        self._catch_up()
        return self.num_drafted - self.num_accepted > _MANY_WRONG + _WRONG_EACH * self._num_output

    def propose(self, limit: int) -> Proposal | None:
        """What may follow the last token, at most `limit` tokens (and MAX_PLACES).

        What the draft model said, which is asked only where nothing else is to be had. Otherwise the client's
        prediction, unless its place is doubtful and a look-up promises more, and then a look-up.
        """
        limit = min(limit, MAX_PLACES)
        if limit <= 0:
            return None
        self._catch_up()
        if self._num_output >= self._next_look:
            self._next_look = self._num_output + self._look_gap
            self._look_gap = min(2 * self._look_gap, _LAST_LOOK)
        if self._drafted is not None:
            token_ids, grades = self._drafted
            return self._proposal(Source.DRAFT_MODEL, token_ids[:limit], grades[:limit])
        self._read()
        predicted = None
        if self._cursor is not None:
            predicted = self._matching(Source.PREDICTION, *self._cursor.propose(limit))
            if predicted is not None and predicted.chances[0] >= _TRUSTED:
                return predicted
        if self._index is not None:
            found = self._matching(Source.LOOKUP, *self._index.propose(limit))
            if found is not None and (predicted is None or found.chances[0] > predicted.chances[0]):
                return found
        return predicted

    def set_drafted(self, token_ids: Sequence[int], probabilities: Sequence[float]) -> None:
        """What a draft model proposes after the last token; forgotten when one arrives. Probabilities may be NaN."""
        self._catch_up()
        self._drafted = (token_ids, probability_grades(probabilities)) if len(token_ids) else None

    def draft_chances(self, count: int) -> list[float]:
        """What to expect of `count` tokens if the draft model is asked for them: chances as in a Proposal."""
        self._catch_up()
        return self._acceptance.by_place(Source.DRAFT_MODEL, count)

    def settle(self, proposal: Proposal | None, num_verified: int, ratio: float) -> None:
        """A step verifies so many of the proposed tokens, and takes `ratio` times as long as one without any drafts."""
        verified = proposal.first(num_verified) if proposal is not None else None
        expected = 1.0 + (verified.expected if verified is not None else 0.0)
        self._gain(expected / ratio - 1.0)

    def wait(self, num_steps: float) -> None:
        """It waited for the draft model as long as so many steps take without drafts."""
        self._gain(-num_steps)

    def _gain(self, num_tokens: float) -> None:
        self._catch_up()
        self._credit = min(max(self._credit + num_tokens, -_MOST_CREDIT), _MOST_CREDIT)

    def resolve(self, num_verified: int, num_accepted: int) -> None:
        """So many drafted tokens were verified, and so many of them are in the output."""
        self.num_drafted += num_verified
        self.num_accepted += num_accepted

    @property
    def draft_counts(self) -> DraftCounts:
        """For the client."""
        return DraftCounts(self.num_accepted, self.num_drafted - self.num_accepted)

    def _read(self) -> None:
        """Brings index and cursor up to the last token."""
        news = self._token_ids[self._num_read :]
        if self._look_up and self._index is None:
            self._index = NgramIndex(self._token_ids)
        elif self._index is not None:
            for token_id in news:
                self._index.append(token_id)
        if self._cursor is not None:
            for token_id in news:
                self._cursor.append(token_id)
        self._num_read += len(news)

    def _matching(self, source: Source, token_ids: Sequence[int], matched: int) -> Proposal | None:
        return self._proposal(source, token_ids, match_grades(matched, len(token_ids))) if token_ids else None

    def _proposal(self, source: Source, token_ids: Sequence[int], grades: Sequence[int]) -> Proposal:
        followed = self._followed[source]
        if followed is None or followed.place == 0:
            self._followed[source] = _Followed(token_ids, grades)
        return Proposal(token_ids, source, self._acceptance.chances(source, grades))
