"""Sizes of stored objects by API key. The key with the most data loses data first."""

from __future__ import annotations

import heapq

_SLACK = 64


class Holdings:
    """Amounts by owner, the hash of a key. `add` takes constant time, `largest` amortized logarithmic time.

    Attributes:
        total: Sum over all owners.
    """

    def __init__(self) -> None:
        self.total = 0
        self._amounts: dict[bytes, int] = {}
        # Heap of negative amounts. An owner's current amount is in the heap, or the owner is in the set of changed
        # owners; other entries are outdated.
        self._heap: list[tuple[int, bytes]] = []
        self._changed: set[bytes] = set()

    def __len__(self) -> int:
        """Return the number of owners with a positive amount."""
        return len(self._amounts)

    def add(self, owner: bytes, amount: int) -> None:
        """Add an amount, which may be negative."""
        self.total += amount
        now = self._amounts.get(owner, 0) + amount
        if now:
            self._amounts[owner] = now
            self._changed.add(owner)
        else:
            self._amounts.pop(owner, None)
            self._changed.discard(owner)

    def largest(self) -> bytes:
        """Return the owner with the largest amount; there must be one."""
        for owner in self._changed:
            heapq.heappush(self._heap, (-self._amounts[owner], owner))
        self._changed.clear()
        if len(self._heap) > 2 * len(self._amounts) + _SLACK:
            self._heap = [(-amount, owner) for owner, amount in self._amounts.items()]
            heapq.heapify(self._heap)
        while True:
            amount, owner = self._heap[0]
            if self._amounts.get(owner) == -amount:
                return owner
            heapq.heappop(self._heap)
