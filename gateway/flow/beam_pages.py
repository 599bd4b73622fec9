"""Reuse of cached pages by the beams of a search.

The prefix cache of a worker evicts the least recently used pages. If the beams of a step have more pages than the
cache holds, the pages of each beam may be gone before its next step, and a search costs the square of its length.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.flow.beam_state import Beam
from shared.errors import InvalidRequestError

MIN_RECOMPUTED_TOKENS = 32_768
"""Tokens that any search may recompute when the cache is too small, however short the search is: as many as a long
prompt has.
"""


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
