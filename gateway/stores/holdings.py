"""How much of a store each key has, and which has most: that one gives way first where room is needed."""

from __future__ import annotations

import heapq

_SLACK = 64


class Holdings:
    """Amounts by owner, the hash of a key. A change takes constant time, and `largest` logarithmic, amortized.

    Attributes:
        total: of all owners.
    """

    def __init__(self) -> None:
        self.total = 0
        self._amounts: dict[bytes, int] = {}
        # Largest first, as negative amounts. Each owner's amount is among them, or the owner among the changed; others
        # are of former amounts.
        self._heap: list[tuple[int, bytes]] = []
        self._changed: set[bytes] = set()

    def __len__(self) -> int:
        """How many owners have anything."""
        return len(self._amounts)

    def add(self, owner: bytes, amount: int) -> None:
        """So much more; less where it is negative."""
        self.total += amount
        now = self._amounts.get(owner, 0) + amount
        if now:
            self._amounts[owner] = now
            self._changed.add(owner)
        else:
            self._amounts.pop(owner, None)
            self._changed.discard(owner)

    def largest(self) -> bytes:
        """Who has most; there must be somebody."""
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
