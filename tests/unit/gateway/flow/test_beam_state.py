"""Groups of beams for a small KV cache, run against a cache that evicts the least recently used pages."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from gateway.flow.beam_state import MIN_RECOMPUTED_TOKENS, Beam, BeamPages
from shared.errors import InvalidRequestError
from shared.messages import TokenLogprobs

PAGE = 4


class Cache:
    """Cache of full pages by content, like that of worker.kv: pages are found until they are evicted."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def run(self, texts: list[tuple[int, ...]]) -> list[int]:
        """Run texts, as many at a time as fit, and return the number of cached tokens of each."""
        found: list[int] = []
        running: list[tuple[int, ...]] = []
        held: set[tuple[int, ...]] = set()
        for text in texts:
            wanted = {text[:end] for end in range(PAGE, len(text) + PAGE, PAGE)}
            if len(held | wanted) > self._num_pages:
                self._give_back(running)
                running, held = [], set()
            ends = range(PAGE, len(text), PAGE)
            found.append(PAGE * next((n for n, end in enumerate(ends) if text[:end] not in self._pages), len(ends)))
            running.append(text)
            held |= wanted
            for page in [page for page in self._pages if page not in held]:
                if len(self._pages.keys() | held) <= self._num_pages:
                    break
                del self._pages[page]
        self._give_back(running)
        return found

    def _give_back(self, texts: list[tuple[int, ...]]) -> None:
        for text in texts:  # last page first
            for end in range(len(text) // PAGE * PAGE, 0, -PAGE):
                self._pages.pop(text[:end], None)
                self._pages[text[:end]] = None


def token(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, [], [])


def search(
    num_pages: int, *, width: int, num_tokens: int, num_prompt_tokens: int, grouped: bool = True, keep: int = 1
) -> int:
    """Run a search that replaces a beam at every `keep`-th step; return the number of computed tokens."""
    pages = BeamPages(
        num_pages=num_pages, page_size=PAGE, num_prompt_tokens=num_prompt_tokens, max_tokens=num_tokens, width=width,
        param="n",
    )  # fmt: skip
    chooser = random.Random(0)
    cache, prompt = Cache(num_pages), tuple(range(1000, 1000 + num_prompt_tokens))
    beams, computed = [Beam((), 0.0)], 0
    for step in range(num_tokens):
        groups = pages.groups(beams)
        assert sorted(index for group in groups for index in group) == list(range(len(beams)))
        for group in groups if grouped else [list(range(len(beams)))]:
            texts = [(*prompt, *beams[index].token_ids) for index in group]
            for text, found in zip(texts, cache.run(texts), strict=True):
                computed += len(text) - found
                pages.count(found)
        if len(beams) == 1:
            beams = [Beam((token(number),), 0.0) for number in range(width)]
            continue
        parents = list(range(width))
        if step % keep == 0:
            parents[chooser.randrange(width)] = chooser.randrange(width)
        beams = [Beam((*beams[parent].tokens, token(place)), 0.0) for place, parent in enumerate(parents)]
    return computed


def test_where_all_fits_there_is_one_group() -> None:
    pages = BeamPages(num_pages=100, page_size=PAGE, num_prompt_tokens=9, max_tokens=40, width=4, param="n")
    beams = [Beam(tuple(token(number) for _ in range(40)), 0.0) for number in range(4)]
    assert pages.groups([Beam((), 0.0)]) == [[0]]
    assert pages.groups(beams) == [[0, 1, 2, 3]]


def test_shared_pages_count_once() -> None:
    """Five pages of the prompt, ten common pages and one per beam are 19; each beam writes one more."""
    shared = tuple(token(number) for number in range(40))
    beams = [Beam((*shared, *(token(number) for _ in range(5))), 0.0) for number in range(4)]
    for num_pages, sizes in ((23, [4]), (22, [3, 1]), (20, [1, 1, 1, 1]), (10, [1, 1, 1, 1])):
        pages = BeamPages(num_pages=num_pages, page_size=PAGE, num_prompt_tokens=20, max_tokens=50, width=4, param="n")
        assert [len(group) for group in pages.groups(beams)] == sizes


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 40])
def test_beams_that_fit_one_by_one_are_found_again(num_prompt_tokens: int) -> None:
    num_pages = (num_prompt_tokens + 6 * 20) // PAGE + 2
    options = {"width": 6, "num_tokens": 20, "num_prompt_tokens": num_prompt_tokens}
    plenty = search(10_000, **options)
    assert search(num_pages, **options) <= 1.1 * plenty


def test_of_beams_that_do_not_fit_most_pages_are_found_again() -> None:
    options = {"width": 8, "num_tokens": 64, "num_prompt_tokens": 8, "keep": 8}
    assert search(60, **options) < search(60, grouped=False, **options) / 2


def test_what_costs_too_much_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"8 beams need \d+ pages of 4 tokens .* has 20, so") as refused:
        search(20, width=8, num_tokens=400, num_prompt_tokens=8)
    assert refused.value.param == "n"


def test_what_is_computed_for_other_reasons_is_not_counted() -> None:
    """A cache that finds nothing, because it is disabled or belongs to another worker."""
    pages = BeamPages(num_pages=10_000, page_size=PAGE, num_prompt_tokens=4, max_tokens=40, width=4, param="n")
    beams = [Beam(tuple(token(number) for _ in range(30)), 0.0) for number in range(4)]
    pages.groups(beams)
    for _ in range(MIN_RECOMPUTED_TOKENS):
        pages.count(0)
