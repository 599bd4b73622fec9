"""Algorithm of beam search: live beams and kept hypotheses, without workers.

Scores and ends follow `transformers`: the score of a hypothesis is the sum of its log-probabilities divided by length
**
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
    """Parameters of a search.

    Attributes:
        width: Beams that live at a time, and hypotheses that are kept.
        num_returned: Number of best hypotheses that become choices.
        length_penalty: Values above 0 favor long hypotheses, values below 0 short ones.
        early_stopping: True ends with the first `width` hypotheses; False ends when no live beam scores higher at
            its present length; "never" ends when none can at any length.
    """

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


class BeamText:
    """Text of one beam, for the detection of stop strings."""

    __slots__ = ("_detokenizer", "_scanner")

    def __init__(self, detokenizer: Detokenizer, scanner: Scanner) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner

    @property
    def ended(self) -> bool:
        """True if a stop string was found."""
        return self._scanner.found is not None

    def continued(self, token_id: int, *, may_end: bool) -> BeamText:
        """Return the text with one more token, whose text counts only if `may_end`."""
        other = BeamText(self._detokenizer.copy(), self._scanner.copy())
        piece = other._detokenizer.push(token_id)
        if may_end:
            other._scanner.push(piece)
        return other


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens of one beam or hypothesis.

    `score` is the sum of their log-probabilities, or the score of the hypothesis.

    `text` is set if there are stop strings.
    """

    tokens: tuple[TokenLogprobs, ...]
    score: float
    text: BeamText | None = None

    @property
    def token_ids(self) -> list[int]:
        """Generated ids."""
        return [token.token_id for token in self.tokens]


class BeamState:
    """State of a search. Call `advance` with a report on each live beam until it is `done`.

    Args:
        params: Parameters of the search.
        max_tokens: Maximum length of a hypothesis.
        stop_ids: Tokens that end a hypothesis.
        min_tokens: Length before which hypotheses do not end.
        masked_ids: Tokens that are never chosen.
        text: Text of an empty beam; None if there are no stop strings.
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
        """Number of likeliest tokens that a report must contain.

        Each beam continues in at most `width` ways, in addition to the tokens that end it or are masked. The number of
        tokens that complete a stop string is unknown; with stop strings the maximum is requested.
        """
        least = self._params.width + len(self.stop_ids | self._masked_ids)
        return least if self.live[0].text is None else max(least, MAX_LOGPROBS)

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """Add one token; reports[i] contains the possible successors of live[i]."""
        width = self._params.width
        self._length += 1
        at_end = self._length >= self._max_tokens
        live: list[Beam] = []
        for rank, (score, index, place) in enumerate(self._continuations(reports)):
            if rank >= width and (at_end or len(live) == width):
                break
            text = self._text(index, reports[index].top_ids[place])
            if at_end or reports[index].top_ids[place] in self.stop_ids or (text is not None and text.ended):
                # Ends below the first `width` are worse than continuations that stay alive.
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
        """Return score, index of the live beam and place in its report of every possible successor, best first."""
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
