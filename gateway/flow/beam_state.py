"""Beam search itself: which beams live, which hypotheses are kept. Knows no workers.

Scores and ends are those of `transformers`: a hypothesis scores the sum of its log-probabilities / length **
length_penalty, and a stop string ends it as a stop token does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from gateway.flow.choice import Scanner
from gateway.text.detokenizer import Detokenizer
from shared.messages import TokenLogprobs
from shared.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Attributes:
    width: beams that live at a time, and hypotheses that are kept.
    num_returned: the best of them, which are the choices.
    length_penalty: above 0 favours long hypotheses, below 0 short ones.
    early_stopping: True: end with the first `width` hypotheses; False: when no live beam scores higher at its
        present length; "never": when none can at any length.
    """

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


class BeamText:
    """The text of one beam, as far as stop strings ask for it."""

    __slots__ = ("_detokenizer", "_scanner")

    def __init__(self, detokenizer: Detokenizer, scanner: Scanner) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner

    @property
    def ended(self) -> bool:
        """Whether a stop string has come."""
        return self._scanner.found is not None

    def continued(self, token_id: int, *, may_end: bool) -> BeamText:
        """With one more token, whose text counts where `may_end`."""
        other = BeamText(self._detokenizer.copy(), self._scanner.copy())
        piece = other._detokenizer.push(token_id)
        if may_end:
            other._scanner.push(piece)
        return other


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of one beam, or of a hypothesis; `score` is their sum, or the hypothesis's own.

    `text` is there where stop strings are looked for.
    """

    tokens: tuple[TokenLogprobs, ...]
    score: float
    text: BeamText | None = None

    @property
    def token_ids(self) -> list[int]:
        """The generated ids."""
        return [token.token_id for token in self.tokens]


class BeamState:
    """The search itself, without workers: `advance` it with a report on each live beam until it is `done`.

    Args:
        stop_ids: tokens that end a hypothesis.
        min_tokens: hypotheses do not end before they have as many.
        masked_ids: tokens that are never chosen.
        text: of no token yet; None: there are no stop strings.
    """

    def __init__(
        self,
        params: BeamParams,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        masked_ids: Collection[int] = (),
        text: BeamText | None = None,
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self.stop_ids = frozenset(stop_ids)
        self._masked_ids = frozenset(masked_ids)
        self._length = 0
        self.live = [Beam((), 0.0, text)]
        self.finished: list[Beam] = []
        self.done = False

    @property
    def num_alternatives(self) -> int:
        """How many of the likeliest tokens a report must have: each beam continues in `width` ways at most, and the
        tokens that end or are masked come on top. How many make a stop string whole is not known: then as many as
        there are."""
        least = self._params.width + len(self.stop_ids | self._masked_ids)
        return least if self.live[0].text is None else max(least, MAX_LOGPROBS)

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """One more token; reports[i] is on what may follow live[i]."""
        width = self._params.width
        self._length += 1
        at_end = self._length >= self._max_tokens
        live: list[Beam] = []
        for rank, (score, index, place) in enumerate(self._continuations(reports)):
            if rank >= width and (at_end or len(live) == width):
                break
            text = self._text(index, reports[index].top_ids[place])
            if at_end or reports[index].top_ids[place] in self.stop_ids or (text is not None and text.ended):
                # What ends below the first `width` has better ones before it, which go on.
                if rank < width:
                    tokens = self._continued(index, reports[index], place)
                    self.finished.append(Beam(tokens, score / self._length**self._params.length_penalty))
            elif len(live) < width:
                live.append(Beam(self._continued(index, reports[index], place), score, text))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        self.live = live
        self.done = at_end or not live or not self._can_improve()

    def _continuations(self, reports: Sequence[TokenLogprobs]) -> list[tuple[float, int, int]]:
        """Score, index of the live beam and place in its report of whatever may follow, best first."""
        masked = self._masked_ids | (self.stop_ids if self._length <= self._min_tokens else frozenset())
        found = [
            (beam.score + logprob, index, place)
            for index, (beam, report) in enumerate(zip(self.live, reports, strict=True))
            for place, (token_id, logprob) in enumerate(zip(report.top_ids, report.top_logprobs, strict=True))
            if token_id not in masked
        ]
        return sorted(found, key=lambda entry: -entry[0])

    def _text(self, index: int, token_id: int) -> BeamText | None:
        text = self.live[index].text
        return text and text.continued(token_id, may_end=self._length > self._min_tokens)

    def _continued(self, index: int, report: TokenLogprobs, place: int) -> tuple[TokenLogprobs, ...]:
        chosen = msgspec.structs.replace(
            report, token_id=report.top_ids[place], logprob=report.top_logprobs[place], rank=place + 1
        )
        return (*self.live[index].tokens, chosen)

    def _can_improve(self) -> bool:
        if len(self.finished) < self._params.width:
            return True
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if early is True:
            return False
        length = self._max_tokens if early == "never" and penalty > 0.0 else self._length
        best: float = self.live[0].score / length**penalty
        return best > self.finished[-1].score
