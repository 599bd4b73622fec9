"""Groups of beams for a small KV cache."""

from __future__ import annotations

import pytest

from gateway.flow.beam_state import MIN_RECOMPUTED_TOKENS, Beam, BeamPages
from shared.errors import InvalidRequestError
from shared.messages import TokenLogprobs

WIDTH = 4
SHARED = tuple(TokenLogprobs(number, -1.0, 1, [], []) for number in range(40))
"""Tokens of all beams; after them, each beam has tokens of its own."""


def pages(num_pages: int) -> BeamPages:
    return BeamPages(num_pages=num_pages, page_size=4, num_prompt_tokens=20, max_tokens=50, width=WIDTH, param="n")


def beams(num_own: int = 5) -> list[Beam]:
    return [
        Beam((*SHARED, *(TokenLogprobs(100 * beam + place, -1.0, 1, [], []) for place in range(num_own))), 0.0)
        for beam in range(WIDTH)
    ]


@pytest.mark.parametrize(
    ("num_pages", "sizes"), [(100, [4]), (23, [4]), (22, [3, 1]), (20, [1, 1, 1, 1]), (10, [1, 1, 1, 1])]
)
def test_shared_pages_count_once(num_pages: int, sizes: list[int]) -> None:
    """Five pages of the prompt, ten common pages and one per beam are 19; each beam writes one more."""
    assert [len(group) for group in pages(num_pages).groups(beams())] == sizes


def test_every_second_step_starts_with_the_pages_used_last() -> None:
    assert pages(20).groups(beams(6)) == [[0], [1], [2], [3]]
    assert pages(20).groups(beams(7)) == [[3], [2], [1], [0]]


def test_beams_whose_pages_are_not_found_again_are_refused_with_the_numbers() -> None:
    small = pages(10)
    with pytest.raises(InvalidRequestError, match=r"4 beams need 20 pages of 4 tokens .* has 10, so") as refused:
        for _ in range(MIN_RECOMPUTED_TOKENS):
            small.groups(beams())
            small.count(0)
    assert refused.value.param == "n"


@pytest.mark.parametrize(("num_pages", "num_cached_tokens"), [(10_000, 0), (10, 64)])
def test_beams_that_fit_or_are_found_again_may_go_on(num_pages: int, num_cached_tokens: int) -> None:
    """A large cache may find nothing for another reason: it is disabled or belongs to another worker."""
    cache = pages(num_pages)
    for _ in range(200):
        cache.groups(beams())
        cache.count(num_cached_tokens)
