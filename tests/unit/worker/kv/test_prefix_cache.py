"""Hits and misses of the prefix cache."""

from __future__ import annotations

import pytest

from shared.block_hash import ROOT, next_page_hash
from worker.kv.prefix_cache import PrefixCache

IDS = [7, 8, 9, 10]


def _insert(cache: PrefixCache, page: int, ids: list[int] = IDS, parent: bytes = ROOT, salt: bytes = b"") -> bytes:
    page_hash = next_page_hash(parent, ids, salt)
    cache.insert(page, page_hash, parent, ids, salt)
    return page_hash


@pytest.mark.parametrize(
    ("parent", "ids", "salt"),
    [(b"x" * 32, IDS, b""), (ROOT, [7, 8, 9, 11], b""), (ROOT, IDS, b"other"), (ROOT, IDS[:3], b"")],
    ids=["parent", "token ids", "salt", "length"],
)
def test_equal_hash_with_other_content_is_a_miss(parent, ids, salt):
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    assert cache.find(page_hash, parent, ids, salt) is None


def test_first_of_two_equal_pages_is_kept_until_it_is_removed():
    cache = PrefixCache()
    page_hash = _insert(cache, 3)
    _insert(cache, 4)
    assert cache.find(page_hash, ROOT, IDS, b"") == 3
    assert cache.pages == {3} and not cache.remove(4)
    assert cache.remove(3)
    assert cache.find(page_hash, ROOT, IDS, b"") is None
    _insert(cache, 4)
    assert cache.find(page_hash, ROOT, IDS, b"") == 4


def test_salt_affects_hashes_of_all_pages():
    cache = PrefixCache()
    first, salted = (_insert(cache, page, salt=salt) for page, salt in ((0, b""), (1, b"tenant")))
    assert first != salted
    second = _insert(cache, 2, parent=first)
    assert _insert(cache, 3, parent=salted, salt=b"tenant") != second
    cache.check()
