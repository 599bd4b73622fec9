"""Pool of KV cache pages as numbers: reference counts, free pages, and free pages that can still be found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class OutOfPagesError(Exception):
    """More pages were requested than are free. The caller checks `num_free` first, so this is a programming error."""


class BlockPool:
    """Reference counts of the pages 0 .. num_pages - 1 of one KV group.

    A page is held (reference count > 0), blank (free, without content) or cached (free, but still in the prefix
    cache). Blank pages are allocated first, then cached ones, least recently released first.

    Args:
        num_pages: Size of the pool.
        on_evict: Called with each cached page that is about to be allocated for other content.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._ref_counts = [0] * num_pages
        # Popped from the end: page 0 is allocated first.
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages that can still be found."""
        return len(self._cached)

    def is_held(self, page: int) -> bool:
        """Return True if a request holds the page."""
        return self._ref_counts[page] > 0

    def allocate(self, count: int) -> list[int]:
        """Return pages with a reference count of 1, for new content. Raises OutOfPagesError."""
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._on_evict(page)
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def acquire(self, page: int) -> None:
        """Add a holder to a page that is held or cached."""
        if self._ref_counts[page] == 0:
            del self._cached[page]
        self._ref_counts[page] += 1

    def release(self, page: int, *, findable: bool) -> None:
        """Remove a holder. After the last one the page is cached if it is findable, else blank."""
        count = self._ref_counts[page] - 1
        if count < 0:
            raise ValueError(f"page {page} was released more often than acquired")
        self._ref_counts[page] = count
        if count == 0:
            if findable:
                self._cached[page] = None
            else:
                self._blank.append(page)

    def forget(self, page: int) -> None:
        """Record that the prefix cache can no longer find the page.

        A cached page becomes blank, a held one stays held.
        """
        if page in self._cached:
            del self._cached[page]
            self._blank.append(page)

    def check(self, held: Iterable[int], findable: set[int]) -> None:
        """Check that the counts equal the holders' lists and that every page is in exactly one state.

        Raises AssertionError.

        Args:
            held: All pages of all holders, with repetitions.
            findable: Pages in the prefix cache.
        """
        expected = [0] * self.num_pages
        for page in held:
            expected[page] += 1
        require(expected == self._ref_counts, "reference counts differ from the pages that requests hold")
        blank, cached = set(self._blank), set(self._cached)
        require(len(blank) == len(self._blank), "a page is listed twice as blank")
        require(not blank & cached, "a page is both blank and cached")
        free = {page for page, count in enumerate(expected) if count == 0}
        require(blank | cached == free, "the free lists differ from the pages without a holder")
        require(cached == free & findable, "the cached pages differ from the free pages in the prefix cache")


def require(holds: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    # Not `assert`, because production runs this too, also under -O.
    if not holds:
        raise AssertionError(message)
