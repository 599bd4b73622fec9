"""Index of pages by content: the tokens of the page and, through the chained hash, all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from shared.block_hash import ROOT, next_page_hash
from worker.kv.block_pool import require


class _Entry(NamedTuple):
    page_hash: bytes
    parent: bytes
    token_ids: bytes
    salt: bytes


class PrefixCache:
    """Map from hash to page for full pages whose keys and values are computed. The first page with a hash stays."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    @property
    def pages(self) -> set[int]:
        """All pages that can be found."""
        return set(self._entries)

    def insert(self, page: int, page_hash: bytes, parent: bytes, token_ids: Sequence[int], salt: bytes) -> None:
        """Make a page findable unless another page with the same hash is."""
        if page_hash not in self._pages:
            self._pages[page_hash] = page
            self._entries[page] = _Entry(page_hash, parent, _packed(token_ids), salt)

    def find(self, page_hash: bytes, parent: bytes, token_ids: Sequence[int], salt: bytes) -> int | None:
        """Return the page with this hash if its parent, tokens and salt are the same too.

        A walk from the first page thus compares every token of the prefix, so that a hash collision is a miss and
        never another prompt's keys and values.
        """
        page = self._pages.get(page_hash)
        if page is None:
            return None
        same = self._entries[page] == _Entry(page_hash, parent, _packed(token_ids), salt)
        return page if same else None

    def remove(self, page: int) -> bool:
        """Make a page unfindable; return True if it was findable."""
        entry = self._entries.pop(page, None)
        if entry is None:
            return False
        del self._pages[entry.page_hash]
        return True

    def check(self) -> None:
        """Check that both directions agree and every hash belongs to its entry. Raises AssertionError."""
        require(len(self._pages) == len(self._entries), "the number of hashes differs from that of pages")
        for page, entry in self._entries.items():
            require(self._pages.get(entry.page_hash) == page, f"page {page} is not the one that its hash finds")
            salt = entry.salt if entry.parent == ROOT else b""
            expected = next_page_hash(entry.parent, array("I", entry.token_ids), salt)
            require(expected == entry.page_hash, f"the hash of page {page} is not that of its tokens")


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()
