"""Algorithm of beam search without workers: live beams, kept hypotheses, and reuse of the beams' cached pages.

Scores and ends follow `transformers`: the score of a hypothesis is the sum of its log-probabilities divided by
length ** length_penalty, and a stop string ends it as a stop token does.

The prefix cache of a worker evicts the least recently used pages. If the beams of a step have more pages than the
cache holds, the pages of each beam may be gone before its next step, and a search costs the square of its length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from gateway.flow.choice import Scanner
from gateway.text.detokenizer import Detokenizer
from shared.errors import InvalidRequestError
from shared.messages import TokenLogprobs
from shared.sampling_params import MAX_LOGPROBS

MIN_RECOMPUTED_TOKENS = 32_768
"""Tokens that any search may recompute when the cache is too small, however short the search is: as many as a long
prompt has.
"""


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


class BeamPages:
    """Pages of the live beams of one search, compared with the cache of a worker.

    Args:
        num_pages: Pages of the worker's KV cache.
        page_size: Tokens per page.
        num_prompt_tokens: Tokens of the prompt.
        max_tokens: Maximum length of a hypothesis.
        width: Number of beams that live at a time.
        param: Request field that an error names.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_prompt_tokens: int, max_tokens: int, width: int, param: str
    ) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._num_prompt_tokens = num_prompt_tokens
        self._width = width
        self._param = param
        self._length = 0
        self._num_found = 0
        self._num_recomputed = 0
        # A beam whose pages are cached computes at most one page per step. Allow twice as much.
        self._max_recomputed = max(MIN_RECOMPUTED_TOKENS, 2 * width * page_size * max_tokens)

    def groups(self, beams: Sequence[Beam]) -> list[list[int]]:
        """Divide the beams of a step into groups that run one after the other, and return their indices.

        If possible, no group writes so many pages that it evicts pages that other groups need. Related beams are
        adjacent, and every second step starts at the other end, because the pages used last are still cached.
        """
        # The tokens in full pages of each beam are found again, except its last token.
        self._length = len(beams[0].tokens)
        num_full = (self._num_prompt_tokens + self._length - 1) // self._page_size
        num_common = min(self._num_prompt_tokens // self._page_size, num_full)
        self._num_found = 0
        if num_common + (num_full - num_common + 1) * len(beams) <= self._num_pages:
            return [list(range(len(beams)))]
        self._num_found = num_common + self._num_own(beams, range(num_common, num_full))
        size = max(1, self._num_pages - self._num_found)
        order = sorted(range(len(beams)), key=lambda index: beams[index].token_ids, reverse=self._length % 2 == 1)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def count(self, num_cached_tokens: int) -> None:
        """Record that a beam of this step has run and found `num_cached_tokens` tokens in the cache.

        Raises:
            InvalidRequestError: The cache is too small, and too many tokens were recomputed. The message has the
                numbers.
        """
        if self._num_found < self._num_pages:
            return
        self._num_recomputed += self._num_prompt_tokens + self._length - num_cached_tokens
        if self._num_recomputed > self._max_recomputed:
            raise InvalidRequestError(
                f"After {self._length} tokens the {self._width} beams need {self._num_found + 1} pages of "
                f"{self._page_size} tokens in the KV cache, which has {self._num_pages}, so most of them would be "
                "recomputed for each further token. Ask for fewer beams or tokens.",
                param=self._param,
            )

    def _num_own(self, beams: Sequence[Beam], pages: range) -> int:
        """Return the number of different pages with these indices.

        Beams share a page if they are equal up to its end. They then share its last token, the same object.
        """
        ends = [(page + 1) * self._page_size - self._num_prompt_tokens - 1 for page in pages]
        return len({id(beam.tokens[end]) for beam in beams for end in ends})
