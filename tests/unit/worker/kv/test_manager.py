"""Sharing, reuse and copying of pages."""

from __future__ import annotations

import pytest

from tests.unit.worker.kv.sequences import TOKENS, computed, make_manager
from worker.kv import prefix_cache
from worker.kv.manager import KVManager
from worker.plan import PageCopy


def _found(kv: KVManager, token_ids: list[int], salt: bytes = b"") -> int:
    return kv.match_prefix(kv.open(salt), token_ids).num_tokens


def test_match_covers_full_pages_but_never_the_last_token():
    kv = make_manager()
    kv.free(computed(kv, TOKENS))
    assert _found(kv, TOKENS) == 20
    assert _found(kv, TOKENS[:20]) == 16
    assert _found(kv, TOKENS[:7]) == 4
    assert _found(kv, TOKENS[:4]) == 0
    assert _found(kv, [*TOKENS[:8], 1, *TOKENS[9:]]) == 8
    assert _found(kv, [1, *TOKENS[1:]]) == 0


def test_match_shares_pages():
    kv = make_manager()
    first = computed(kv, TOKENS)
    second = computed(kv, TOKENS)
    assert second.tables[0][:5] == first.tables[0][:5]
    assert kv.pages_in_use == 7
    kv.free(first)
    assert kv.pages_in_use == 6
    kv.free(second)
    assert (kv.pages_in_use, kv.num_cached) == (0, 5)


def test_salts_keep_tenants_apart():
    kv = make_manager()
    kv.free(computed(kv, TOKENS, b"one"))
    assert _found(kv, TOKENS, b"one") == 20
    assert _found(kv, TOKENS, b"two") == _found(kv, TOKENS) == 0


def test_pages_are_hashed_only_when_full_and_computed():
    kv = make_manager()
    sequence = kv.open(b"")
    assert kv.extend(sequence, len(TOKENS))
    assert _found(kv, TOKENS) == 0
    kv.commit(sequence, TOKENS, 11)
    assert _found(kv, TOKENS) == 8
    assert sequence.num_committed == 2


def test_prefix_tail_is_evicted_before_its_head():
    kv = make_manager(num_pages=6)
    kv.free(computed(kv, TOKENS[:20]))
    other = kv.open(b"")
    assert kv.extend(other, 12)
    kv.check_integrity()
    assert kv.num_evictions == 2
    assert _found(kv, TOKENS) == 12


def test_pages_of_failed_sequence_are_never_found_again():
    kv = make_manager()
    kv.free(computed(kv, TOKENS[:8]))
    sequence = computed(kv, TOKENS)
    sharer = computed(kv, TOKENS)
    kv.free(sequence, distrust=True)
    kv.check_integrity()
    assert _found(kv, TOKENS) == 0
    kv.free(sharer)
    kv.check_integrity()
    assert (kv.pages_in_use, kv.num_cached) == (0, 0)


def test_extend_without_enough_pages_changes_nothing():
    kv = make_manager(num_pages=3)
    sequence = kv.open(b"")
    assert kv.extend(sequence, 8)
    assert not kv.extend(sequence, 13)
    assert (len(sequence.tables[0]), sequence.num_slots, kv.num_free) == (2, 8, 1)
    assert kv.extend(sequence, 12)


def test_fits_excludes_cached_pages_of_the_match():
    kv = make_manager(num_pages=5)
    kv.free(computed(kv, TOKENS[:16]))
    match = kv.match_prefix(kv.open(b""), TOKENS[:20])
    # 4 of the 5 free pages are the match itself.
    assert kv.fits(20, match)
    assert not kv.fits(21, match)
    assert not kv.fits(20, match, reserve=1)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_fork_shares_full_pages_and_copies_a_partial_one(num_groups):
    kv = make_manager(num_groups=num_groups)
    parent = computed(kv, TOKENS[:10])
    child = kv.open(b"")
    copies = kv.fork(parent, child, 9)
    kv.check_integrity()
    assert [table[:2] for table in child.tables] == [table[:2] for table in parent.tables]
    assert copies == [PageCopy(group, parent.tables[group][2], child.tables[group][2]) for group in range(num_groups)]
    assert all(copy.source != copy.target for copy in copies)
    whole = kv.open(b"")
    assert kv.fork(parent, whole, 8) == [] and whole.num_slots == 8
    for sequence in (parent, child, whole):
        kv.free(sequence)
    assert kv.pages_in_use == 0


def test_match_requires_page_in_all_groups():
    kv = make_manager(num_groups=2)
    sequence = computed(kv, TOKENS)
    kv.free(sequence)
    assert _found(kv, TOKENS) == 20
    kv._caches[1].remove(next(iter(kv._caches[1].pages)))
    assert _found(kv, TOKENS) < 20


def test_prefix_caching_can_be_disabled():
    kv = make_manager(enable_prefix_caching=False)
    kv.free(computed(kv, TOKENS))
    assert _found(kv, TOKENS) == 0
    assert kv.num_cached == 0


def test_check_integrity_detects_wrong_hash_and_lost_page():
    kv = make_manager()
    sequence = computed(kv, TOKENS)
    cache = kv._caches[0]
    page = sequence.tables[0][0]
    entry = cache._entries[page]
    cache._entries[page] = prefix_cache._Entry(entry.page_hash, entry.parent, b"\1\0\0\0" * 4, entry.salt)
    with pytest.raises(AssertionError, match="hash of page"):
        kv.check_integrity()
    cache._entries[page] = entry
    kv.check_integrity()
    sequence.tables[0].pop()
    with pytest.raises(AssertionError, match="reference counts differ"):
        kv.check_integrity()


def test_repeated_match_reflects_current_cache():
    kv = make_manager(num_pages=6)
    waiting = kv.open(b"")
    assert kv.match_prefix(waiting, TOKENS).num_tokens == 0
    sequence = kv.open(b"")
    assert kv.extend(sequence, len(TOKENS))
    kv.commit(sequence, TOKENS, 8)
    assert kv.match_prefix(waiting, TOKENS) == kv.match_prefix(waiting, TOKENS)
    assert kv.match_prefix(waiting, TOKENS).num_tokens == 8
    assert kv.match_prefix(waiting, TOKENS[:6]).num_tokens == 4
    kv.commit(sequence, TOKENS, 20)
    assert kv.match_prefix(waiting, TOKENS).num_revived == [0]
    kv.free(sequence)
    match = kv.match_prefix(waiting, TOKENS)
    assert (match.num_tokens, match.num_revived) == (20, [5])
    # One blank page, then the tail of the prefix.
    assert kv.extend(kv.open(b""), 12)
    assert kv.match_prefix(waiting, TOKENS).num_tokens == 12
