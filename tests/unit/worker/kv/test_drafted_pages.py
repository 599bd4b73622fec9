"""Draft marks of pages, and how they follow pages from one sequence to the next."""

from __future__ import annotations

import random

import pytest

from tests.unit.worker.kv.sequences import TOKENS, computed, make_manager
from worker.kv.manager import SequencePages


@pytest.mark.parametrize(("num_drafted", "found"), [(0, 0), (3, 0), (4, 4), (11, 8), (22, 20)])
def test_prefix_hit_includes_leading_drafted_pages(num_drafted, found):
    kv = make_manager()
    first = computed(kv, TOKENS, num_drafted=num_drafted)
    assert first.num_drafted == num_drafted
    second = computed(kv, TOKENS)
    assert second.num_drafted == found
    kv.free(first)
    kv.free(second)
    assert first.num_drafted == second.num_drafted == 0
    assert computed(kv, TOKENS).num_drafted == found


def test_blank_pages_lose_draft_marks():
    kv = make_manager(enable_prefix_caching=False)
    kv.free(computed(kv, TOKENS, num_drafted=22))
    sequence = computed(kv, TOKENS)
    assert sequence.num_drafted == kv.find_drafted(sequence) == 0
    kv.commit_drafted(sequence, 9)
    kv.free(sequence, distrust=True)
    assert kv.find_drafted(computed(kv, TOKENS)) == 0


def test_only_leading_drafted_pages_count():
    kv = make_manager()
    first = computed(kv, TOKENS)
    second = computed(kv, TOKENS[:9], num_drafted=9)  # marks the first two pages
    assert (first.num_drafted, kv.find_drafted(first)) == (0, 8)
    kv.free(first)
    kv.free(second)
    kv.free(computed(kv, list(range(500, 536))))  # allocates all of the 12 pages but the first three
    again = computed(kv, TOKENS)
    assert again.num_drafted == 8
    kv.commit_drafted(again, 7)  # existing marks stay
    assert again.num_drafted == 8


@pytest.mark.parametrize(
    ("num_tokens", "num_drafted", "found"), [(22, 21, 21), (21, 22, 21), (19, 10, 10), (20, 22, 20)]
)
def test_fork_inherits_draft_marks(num_tokens, num_drafted, found):
    kv = make_manager()
    parent = computed(kv, TOKENS, num_drafted=num_drafted)
    child = kv.open(b"")
    copies = kv.fork(parent, child, num_tokens)
    assert len(copies) == (num_tokens % 4 > 0)
    assert child.num_drafted == found
    kv.check_integrity()
    kv.extend(child, 24)
    kv.commit_drafted(child, 24)
    kv.check_integrity()
    kv.free(parent)
    kv.free(child)
    kv.check_integrity()


def test_siblings_see_each_others_draft_marks():
    kv = make_manager()
    parent = computed(kv, TOKENS)
    children = [kv.open(b"") for _ in range(3)]
    for child in children:
        kv.fork(parent, child, 21)
        kv.extend(child, 22)
    kv.commit_drafted(children[1], 21)
    assert [kv.find_drafted(child) for child in (parent, *children)] == [20, 20, 21, 20]
    kv.check_integrity()


def test_excess_drafted_tokens_are_refused_and_lost_marks_detected():
    kv = make_manager()
    sequence = computed(kv, TOKENS, num_drafted=8)
    with pytest.raises(ValueError, match="25 tokens drafted in pages for 24"):
        kv.commit_drafted(sequence, 25)
    kv._drafted.discard(sequence.tables[0][1])
    with pytest.raises(AssertionError, match="not marked"):
        kv.check_integrity()
    sequence.num_drafted = 25
    with pytest.raises(AssertionError, match="more tokens are drafted"):
        kv.check_integrity()


def test_only_first_group_has_draft_marks():
    kv = make_manager(num_groups=2)
    # Page 0 has a different position in the second group's table than in the first group's.
    other = computed(kv, list(range(300, 308)))
    sequence = computed(kv, TOKENS, num_drafted=22)
    kv.free(other)
    kv.free(sequence)
    assert computed(kv, TOKENS).num_drafted == 20


def test_draft_mark_never_outlives_page_content():
    """Compare random operations over few pages with a record of the content that each draft half was computed for."""
    rng = random.Random(5)
    kv = make_manager(num_pages=14)
    live: list[tuple[SequencePages, list[int]]] = []
    halves: dict[int, tuple[int, ...]] = {}
    hits = 0
    for _ in range(3000):
        action = rng.random()
        if action < 0.35 and len(live) < 4:
            text = [rng.choice((1, 2)) for _ in range(rng.randrange(1, 26))]
            sequence = kv.open(b"")
            match = kv.match_prefix(sequence, text)
            if kv.fits(len(text), match):
                kv.adopt(sequence, match)
                kv.extend(sequence, len(text))
                kv.commit(sequence, text, len(text))
                live.append((sequence, text))
                hits += sequence.num_drafted > 0
        elif action < 0.45 and live and len(live) < 4:
            parent, text = rng.choice(live)
            if kv.fits(len(text), kv.shared_with(parent, len(text))):
                child = kv.open(b"")
                kv.fork(parent, child, len(text))
                live.append((child, text))
        elif action < 0.75 and live:
            sequence, text = rng.choice(live)
            num_drafted = rng.randrange(len(text) + 1)
            for index in range(sequence.num_drafted // 4, num_drafted // 4):
                halves[sequence.tables[0][index]] = tuple(text[: 4 * index + 4])
            kv.commit_drafted(sequence, num_drafted)
        elif live:
            sequence, _ = live.pop(rng.randrange(len(live)))
            kv.free(sequence, distrust=rng.random() < 0.1)
        kv.check_integrity()
        for sequence, text in live:
            for index in range(kv.find_drafted(sequence) // 4):
                assert halves[sequence.tables[0][index]] == tuple(text[: 4 * index + 4])
    assert hits > 30
