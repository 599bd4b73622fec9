"""Order of requests (priority first, lower first; then first come, first served), and their deadlines."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from worker.requests.request import Request, Status

_key = attrgetter("key")


class RequestQueue:
    """Requests sorted by their key. The first one is served first; the last one is preempted first.

    A preempted request keeps its key and so comes back before all that arrived after it: within a priority no request
    starves.
    """

    def __init__(self) -> None:
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Request:
        return self._items[index]

    def add(self, request: Request) -> None:
        """Add a request in its place."""
        insort(self._items, request, key=_key)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ValueError if it is not in the queue."""
        index = bisect_left(self._items, request.key, key=_key)
        if index == len(self._items) or self._items[index] is not request:
            raise ValueError(f"request {request.request_id} is not in the queue")
        del self._items[index]


class DeadlineQueue:
    """Requests that must start before a time, most urgent first.

    A request that started or ended stays until its time comes or until the next pruning, which keeps the queue
    proportional to the number of waiting requests, because each keeps its prompt alive.
    """

    _SLACK = 64

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._prune_at = self._SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, deadline: float) -> None:
        """Add a request until it starts."""
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if self._is_watched(entry[2])]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + self._SLACK
        heapq.heappush(self._heap, (deadline, request.arrival, request))

    def pop_expired(self, now: float) -> Iterator[Request]:
        """Return the requests that have not started by their deadline.

        Once a choice has started, its siblings may continue to wait.
        """
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heapq.heappop(self._heap)
            if self._is_watched(request):
                yield request

    @staticmethod
    def _is_watched(request: Request) -> bool:
        return request.status is not Status.FINISHED and not request.has_started


def admission_reserve(num_running: int, num_pages: int) -> int:
    """Return the pages that admission leaves free, so that running requests can grow before one must be preempted.

    Each running request takes one page per page_size steps. The reserve is one page for each, at most a twentieth of
    the cache, and none if nothing runs, so that a request that fits the cache alone is always admitted.
    """
    return min(num_running, max(1, num_pages // 20))
