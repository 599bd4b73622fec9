"""What the cache finds, and what it must not."""

from __future__ import annotations

import pytest

from shared.block_hash import ROOT, next_page_hash
from worker.kv.prefix_cache import PrefixCache

IDS = [7, 8, 9, 10]


def _insert(cache: PrefixCache, page: int, ids: list[int] = IDS, parent: bytes = ROOT, salt: bytes = b"") -> bytes:
    page_hash = next_page_hash(parent, ids, salt)
    cache.insert(page, page_hash, parent, ids, salt)
    return page_hash


def test_a_page_is_found_by_all_that_it_depends_on():
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    assert cache.find(page_hash, ROOT, IDS, b"") == 3
    assert 3 in cache and len(cache) == 1 and cache.pages == {3}


@pytest.mark.parametrize(
    ("parent", "ids", "salt"),
    [(b"x" * 32, IDS, b""), (ROOT, [7, 8, 9, 11], b""), (ROOT, IDS, b"other"), (ROOT, IDS[:3], b"")],
    ids=["parent", "token ids", "salt", "length"],
)
def test_the_same_hash_of_something_else_is_a_miss(parent, ids, salt):
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    assert cache.find(page_hash, parent, ids, salt) is None


def test_of_two_pages_with_the_same_content_the_first_stays():
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    _insert(cache, 4)
    assert cache.find(page_hash, ROOT, IDS, b"") == 3
    assert 4 not in cache
    assert not cache.remove(4)
    assert cache.find(page_hash, ROOT, IDS, b"") == 3


def test_a_removed_page_makes_room_for_another():
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    assert cache.remove(3)
    assert cache.find(page_hash, ROOT, IDS, b"") is None
    _insert(cache, 4)
    assert cache.find(page_hash, ROOT, IDS, b"") == 4


def test_the_salt_enters_through_the_first_page_and_reaches_all():
    cache = PrefixCache()
    first, salted = (_insert(cache, page, salt=salt) for page, salt in ((0, b""), (1, b"tenant")))
    assert first != salted
    second = _insert(cache, 2, parent=first)
    assert _insert(cache, 3, parent=salted, salt=b"tenant") != second
    cache.check()


def test_check_finds_pages_and_hashes_that_disagree():
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    cache._pages[page_hash] = 4
    with pytest.raises(AssertionError, match="page 3 is not the one that its hash finds"):
        cache.check()
    del cache._pages[page_hash]
    with pytest.raises(AssertionError, match="number of hashes differs"):
        cache.check()
