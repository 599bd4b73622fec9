"""Which pages have their draft half: marks that go with pages from one sequence to the next."""

from __future__ import annotations

import random

import pytest

from worker.kv.manager import KVManager, SequencePages

TOKENS = list(range(100, 122))


def make(**options) -> KVManager:
    return KVManager(**{"num_pages": 12, "page_size": 4, **options})


def computed(kv: KVManager, token_ids: list[int], num_drafted: int = 0) -> SequencePages:
    """A sequence whose tokens are all computed, and some of them drafted."""
    sequence = kv.open(b"")
    kv.adopt(sequence, kv.match_prefix(sequence, token_ids))
    assert kv.extend(sequence, len(token_ids))
    kv.commit(sequence, token_ids, len(token_ids))
    kv.commit_drafted(sequence, num_drafted)
    kv.check_integrity()
    return sequence


@pytest.mark.parametrize(("num_drafted", "found"), [(0, 0), (3, 0), (4, 4), (11, 8), (22, 20)])
def test_a_hit_brings_the_leading_pages_that_are_drafted(num_drafted, found):
    kv = make()
    first = computed(kv, TOKENS, num_drafted)
    assert first.num_drafted == num_drafted
    second = computed(kv, TOKENS)
    assert second.num_drafted == found
    kv.free(first)
    kv.free(second)
    assert first.num_drafted == second.num_drafted == 0
    assert computed(kv, TOKENS).num_drafted == found


def test_a_page_that_is_handed_out_for_other_content_has_no_draft_half():
    kv = make(num_pages=6)
    kv.free(computed(kv, TOKENS, 22))
    assert kv.num_cached == 5
    other = computed(kv, list(range(500, 512)), 0)  # takes the blank page and the last two cached ones
    assert other.num_drafted == 0 and kv.find_drafted(other) == 0
    kv.check_integrity()
    assert computed(kv, TOKENS[:12]).num_drafted == 8


def test_blank_pages_lose_their_marks_too():
    kv = make(enable_prefix_caching=False)
    kv.free(computed(kv, TOKENS, 22))
    sequence = computed(kv, TOKENS)
    assert sequence.num_drafted == kv.find_drafted(sequence) == 0
    kv.commit_drafted(sequence, 9)
    kv.free(sequence, distrust=True)
    assert kv.find_drafted(computed(kv, TOKENS)) == 0


def test_only_a_leading_run_counts():
    kv = make()
    first = computed(kv, TOKENS)
    second = computed(kv, TOKENS[:9], 9)  # marks the first two pages
    assert (first.num_drafted, kv.find_drafted(first)) == (0, 8)
    kv.free(first)
    kv.free(second)
    kv.free(computed(kv, list(range(500, 536))))  # of 12 pages all but the first three are handed out
    again = computed(kv, TOKENS)
    assert again.num_drafted == 8
    kv.commit_drafted(again, 7)  # what is known already stays
    assert again.num_drafted == 8


@pytest.mark.parametrize(
    ("num_tokens", "num_drafted", "found"), [(22, 21, 21), (21, 22, 21), (19, 10, 10), (20, 22, 20)]
)
def test_a_fork_has_what_its_parent_has_drafted(num_tokens, num_drafted, found):
    kv = make()
    parent = computed(kv, TOKENS, num_drafted)
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


def test_siblings_find_what_one_of_them_drafts():
    kv = make()
    parent = computed(kv, TOKENS)
    children = [kv.open(b"") for _ in range(3)]
    for child in children:
        kv.fork(parent, child, 21)
        kv.extend(child, 22)
    kv.commit_drafted(children[1], 21)
    assert [kv.find_drafted(child) for child in (parent, *children)] == [20, 20, 21, 20]
    kv.check_integrity()


def test_more_tokens_than_pages_are_refused_and_lost_marks_are_found():
    kv = make()
    sequence = computed(kv, TOKENS, 8)
    with pytest.raises(ValueError, match="25 tokens drafted in pages for 24"):
        kv.commit_drafted(sequence, 25)
    kv._drafted.discard(sequence.tables[0][1])
    with pytest.raises(AssertionError, match="not marked"):
        kv.check_integrity()
    sequence.num_drafted = 25
    with pytest.raises(AssertionError, match="more tokens are drafted"):
        kv.check_integrity()


def test_the_first_group_alone_has_draft_halves():
    kv = make(num_groups=2)
    # Page 0 of the second group is in another place of its table than of the first one's.
    other = computed(kv, list(range(300, 308)))
    sequence = computed(kv, TOKENS, 22)
    kv.free(other)
    kv.free(sequence)
    assert computed(kv, TOKENS).num_drafted == 20


def test_a_mark_never_outlives_the_content_of_its_page():
    """Random lives over few pages, against a record of which content each page's draft half was computed for."""
    rng = random.Random(5)
    kv = make(num_pages=14)
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
