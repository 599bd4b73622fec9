"""Whether the beams of a search find their pages again: a step that does not computes every beam from its beginning.

A worker's prefix cache drops what was used longest ago. Where the beams of a step have more pages than it holds, each
beam's may be gone by the time its turn comes again, and a search costs the square of its length.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.flow.beam_state import Beam
from shared.errors import InvalidRequestError

MIN_RECOMPUTED_TOKENS = 32_768
"""What any search may compute where the cache is too small, however short it is: as much as a long prompt."""


class BeamPages:
    """The pages of one search's live beams, against those of a worker.

    Args:
        num_pages, page_size: of a worker's KV cache, whose pages hold as many tokens each.
        num_prompt_tokens, max_tokens: of the search.
        width: beams that live at a time.
        param: the request field that an error names.
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
        # A beam whose pages are found computes at most one page a step. Twice as much is too much.
        self._max_recomputed = max(MIN_RECOMPUTED_TOKENS, 2 * width * page_size * max_tokens)

    def groups(self, beams: Sequence[Beam]) -> list[list[int]]:
        """The indices of these beams, which are those of a step, in groups that run one after the other: no group
        writes so many pages that it drives out what the others find again, where that can be.

        Relatives stand side by side, and every second step begins at the other end: what was used last is still there.
        """
        # Of each beam's tokens those in full pages are found again, but never the last one.
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
        """A beam of this step has run, and found so many tokens in the cache.

        Raises InvalidRequestError, with the numbers, where the cache is too small and that has cost too much.
        """
        if self._num_found < self._num_pages:
            return
        self._num_recomputed += self._num_prompt_tokens + self._length - num_cached_tokens
        if self._num_recomputed > self._max_recomputed:
            raise InvalidRequestError(
                f"After {self._length} tokens the {self._width} beams need {self._num_found + 1} pages of "
                f"{self._page_size} tokens in the KV cache, which has {self._num_pages}: for each further token most "
                "of them would be computed again. Ask for fewer beams or tokens.",
                param=self._param,
            )

    def _num_own(self, beams: Sequence[Beam], pages: range) -> int:
        """Different pages with these numbers. Beams have one page where they have the same beginning up to its end, and
        then they have its last token in common, the very object."""
        ends = [(page + 1) * self._page_size - self._num_prompt_tokens - 1 for page in pages]
        return len({id(beam.tokens[end]) for beam in beams for end in ends})
