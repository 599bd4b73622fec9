"""Owner of block tables, of the sharing of pages, and of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.block_hash import ROOT, next_page_hash
from worker.kv.block_pool import BlockPool, require
from worker.kv.prefix_cache import PrefixCache
from worker.plan import PageCopy


class SequencePages:
    """Pages of one sequence. Only the KVManager writes here, except `num_announced`.

    Attributes:
        salt: Salt of its hashes.
        tables: Per KV group, the pages in the order of positions. All groups grow together.
        num_slots: Number of tokens that the pages can hold.
        num_announced: Number of entries of each block table that the executor knows; written by the scheduler.
        num_committed: Number of leading full pages that are computed and, with caching, in the prefix cache.
        num_drafted: Number of leading tokens that the draft model has computed too; 0 without a draft model.
        last_match: Last result of `match_prefix`, with its version and number of tokens.
        hashes: Hashes of the leading full pages, as far as they were needed. They depend only on token ids and so
            outlive the pages after a preemption.
    """

    __slots__ = ("hashes", "last_match", "num_announced", "num_committed", "num_drafted", "num_slots", "salt", "tables")

    def __init__(self, salt: bytes, num_groups: int) -> None:
        self.salt = salt
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_slots = 0
        self.num_announced = 0
        self.num_committed = 0
        self.num_drafted = 0
        self.hashes: list[bytes] = []
        self.last_match: tuple[int, int, PrefixMatch] | None = None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Reusable prefix of a prompt.

    Attributes:
        num_tokens: Reusable tokens, a multiple of the page size.
        pages: Per KV group, the pages that hold them.
        num_revived: Per KV group, how many of these pages are free now and would leave the pool.
    """

    num_tokens: int
    pages: list[list[int]]
    num_revived: list[int]


class KVManager:
    """Pages for sequences, in one pool per KV group.

    With a draft model, each page of the first group has a second half for the draft model's keys and values. It is
    computed separately, later than the target's half or never, so a page is marked when its draft half is complete.
    The mark stays with the page when another sequence uses it, until the page is allocated for other content.

    Args:
        num_pages: Pages of each group's pool.
        page_size: Tokens per page, the same in all groups.
        num_groups: Number of KV groups; 1 for Llama.
        enable_prefix_caching: Hash full pages and find them again.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_groups: int = 1, enable_prefix_caching: bool = True
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evictions = 0
        self._caches = [PrefixCache() for _ in range(num_groups)]
        self._pools = [BlockPool(num_pages, self._evictor(cache)) for cache in self._caches]
        self._live: set[SequencePages] = set()
        # Pages of the first group with a computed draft half; blank pages may remain among them.
        self._drafted: set[int] = set()
        # Increased whenever a page changes its holder or becomes findable.
        self._version = 0
        self.no_match = PrefixMatch(0, [[] for _ in range(num_groups)], [0] * num_groups)

    @property
    def num_free(self) -> int:
        """Number of pages that every group has free."""
        return min(pool.num_free for pool in self._pools)

    @property
    def pages_in_use(self) -> int:
        """Number of pages that sequences hold, in the fullest group."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of free pages that can still be found, in the group with most of them."""
        return max(pool.num_cached for pool in self._pools)

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence that fits when it is alone."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def open(self, salt: bytes) -> SequencePages:
        """Return an empty sequence. It counts as live from its first page until `free`."""
        return SequencePages(salt, self.num_groups)

    def match_prefix(self, sequence: SequencePages, token_ids: Sequence[int]) -> PrefixMatch:
        """Return the longest run of leading pages that all groups have, without taking them.

        It has whole pages only and never includes the last token, whose logits are needed to sample the next one.
        """
        if not self.enable_prefix_caching:
            return self.no_match
        # The first request of the queue asks in every step, usually without any change since the last one.
        last = sequence.last_match
        if last is not None and last[:2] == (self._version, len(token_ids)):
            return last[2]
        match = self._match(sequence, token_ids)
        sequence.last_match = (self._version, len(token_ids), match)
        return match

    def _match(self, sequence: SequencePages, token_ids: Sequence[int]) -> PrefixMatch:
        size = self.page_size
        pages: list[list[int]] = [[] for _ in range(self.num_groups)]
        parent = ROOT
        for index in range((len(token_ids) - 1) // size):
            ids = token_ids[index * size : (index + 1) * size]
            page_hash = self._hash(sequence, index, parent, ids)
            found = [cache.find(page_hash, parent, ids, sequence.salt) for cache in self._caches]
            hits = [page for page in found if page is not None]
            if len(hits) < self.num_groups:
                break
            for table, page in zip(pages, hits, strict=True):
                table.append(page)
            parent = page_hash
        revived = [
            sum(not pool.is_held(page) for page in table) for pool, table in zip(self._pools, pages, strict=True)
        ]
        return PrefixMatch(len(pages[0]) * size, pages, revived)

    def fits(self, num_tokens: int, match: PrefixMatch, reserve: int = 0) -> bool:
        """Return True if a new sequence of num_tokens can start from `match` and leave `reserve` pages free."""
        wanted = self.pages_for(num_tokens) + reserve
        return all(
            wanted - len(pages) + revived <= pool.num_free
            for pool, pages, revived in zip(self._pools, match.pages, match.num_revived, strict=True)
        )

    def adopt(self, sequence: SequencePages, match: PrefixMatch) -> None:
        """Give an empty sequence the pages of a match, immediately after match_prefix."""
        for pool, table, pages in zip(self._pools, sequence.tables, match.pages, strict=True):
            for page in pages:
                pool.acquire(page)
            table.extend(pages)
        self._version += 1
        sequence.last_match = None
        sequence.num_committed = len(match.pages[0])
        sequence.num_slots = match.num_tokens
        if match.num_tokens:
            self._live.add(sequence)
        self.find_drafted(sequence)

    def shared_with(self, parent: SequencePages, num_tokens: int) -> PrefixMatch:
        """Return the full pages below num_tokens of a live sequence as a match."""
        count = num_tokens // self.page_size
        return PrefixMatch(count * self.page_size, [table[:count] for table in parent.tables], [0] * self.num_groups)

    def fork(self, parent: SequencePages, child: SequencePages, num_tokens: int) -> list[PageCopy]:
        """Give an empty child the first num_tokens tokens of its parent.

        Full pages are shared. A partial last page is copied together with its draft half, because both sequences will
        write to it. The caller has checked with `fits` that a page is available.
        """
        shared = self.shared_with(parent, num_tokens)
        child.hashes = parent.hashes[: len(shared.pages[0])]
        self.adopt(child, shared)
        # Pages that the parent has not committed yet are committed by the child's first own step.
        child.num_committed = min(child.num_committed, parent.num_committed)
        if num_tokens == shared.num_tokens:
            return []
        self.extend(child, num_tokens)
        # For the copied page: only if everything before it is drafted.
        child.num_drafted = max(child.num_drafted, min(parent.num_drafted, num_tokens))
        index = len(shared.pages[0])
        return [
            PageCopy(group, theirs[index], ours[index])
            for group, (theirs, ours) in enumerate(zip(parent.tables, child.tables, strict=True))
        ]

    def extend(self, sequence: SequencePages, num_tokens: int) -> bool:
        """Make room for num_tokens in total; return False without any change if there are not enough pages."""
        if num_tokens <= sequence.num_slots:
            return True
        count = self.pages_for(num_tokens) - len(sequence.tables[0])
        if count > self.num_free:
            return False
        self._version += 1
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            table.extend(pool.allocate(count))
        if self._drafted:
            self._drafted.difference_update(sequence.tables[0][-count:])
        sequence.num_slots = len(sequence.tables[0]) * self.page_size
        self._live.add(sequence)
        return True

    def commit(self, sequence: SequencePages, token_ids: Sequence[int], num_computed: int) -> None:
        """Record that the first num_computed tokens are computed and their ids known.

        Hash the pages that became full.
        """
        size = self.page_size
        for index in range(sequence.num_committed, num_computed // size):
            if self.enable_prefix_caching:
                ids = token_ids[index * size : (index + 1) * size]
                parent = sequence.hashes[index - 1] if index else ROOT
                page_hash = self._hash(sequence, index, parent, ids)
                for cache, table in zip(self._caches, sequence.tables, strict=True):
                    cache.insert(table[index], page_hash, parent, ids, sequence.salt)
            sequence.num_committed = index + 1
            self._version += 1

    def commit_drafted(self, sequence: SequencePages, num_drafted: int) -> None:
        """Record that the draft model has computed the first num_drafted tokens, all of them known by now.

        A number below the recorded one changes nothing.

        Raises:
            ValueError: The sequence has no pages for so many tokens.
        """
        if num_drafted > sequence.num_slots:
            raise ValueError(f"{num_drafted} tokens drafted in pages for {sequence.num_slots} tokens")
        if num_drafted > sequence.num_drafted:
            first, end = sequence.num_drafted // self.page_size, num_drafted // self.page_size
            self._drafted.update(sequence.tables[0][first:end])
            sequence.num_drafted = num_drafted

    def find_drafted(self, sequence: SequencePages) -> int:
        """Return the sequence's num_drafted, increased by what others have drafted in shared pages."""
        if self._drafted:
            size, pages = self.page_size, sequence.tables[0]
            index = sequence.num_drafted // size
            while index < len(pages) and pages[index] in self._drafted:
                index += 1
            sequence.num_drafted = max(sequence.num_drafted, index * size)
        return sequence.num_drafted

    def free(self, sequence: SequencePages, *, distrust: bool = False) -> None:
        """Release all pages. Those in the prefix cache remain findable until they are reused.

        Args:
            sequence: The sequence.
            distrust: The computation failed or gave non-finite numbers, so its pages must not be found again.
        """
        self._version += 1
        for pool, cache, table in zip(self._pools, self._caches, sequence.tables, strict=True):
            # Last page first: the tail of a prefix is useless without its head, so it must be evicted earlier.
            for page in reversed(table):
                if distrust and cache.remove(page):
                    pool.forget(page)
                pool.release(page, findable=page in cache)
            table.clear()
        sequence.num_slots = sequence.num_announced = sequence.num_committed = sequence.num_drafted = 0
        self._live.discard(sequence)

    def check_integrity(self) -> None:
        """Check that counts, free lists, tables and hashes are consistent. Raises AssertionError."""
        for group, (pool, cache) in enumerate(zip(self._pools, self._caches, strict=True)):
            cache.check()
            pool.check((page for sequence in self._live for page in sequence.tables[group]), cache.pages)
        for sequence in self._live:
            lengths = {len(table) for table in sequence.tables}
            require(lengths == {sequence.num_slots // self.page_size}, "block tables of the KV groups differ in length")
            distinct = all(len(set(table)) == len(table) for table in sequence.tables)
            require(distinct, "a page is listed twice in one block table")
            require(sequence.num_drafted <= sequence.num_slots, "more tokens are drafted than there are pages for")
            drafted = sequence.tables[0][: sequence.num_drafted // self.page_size]
            require(self._drafted.issuperset(drafted), "a page of drafted tokens is not marked")

    @property
    def num_live(self) -> int:
        """Number of sequences that hold pages."""
        return len(self._live)

    def _hash(self, sequence: SequencePages, index: int, parent: bytes, token_ids: Sequence[int]) -> bytes:
        if index < len(sequence.hashes):
            return sequence.hashes[index]
        page_hash = next_page_hash(parent, token_ids, sequence.salt)
        sequence.hashes.append(page_hash)
        return page_hash

    def _evictor(self, cache: PrefixCache) -> Callable[[int], None]:
        def evict(page: int) -> None:
            cache.remove(page)
            self.num_evictions += 1

        return evict
