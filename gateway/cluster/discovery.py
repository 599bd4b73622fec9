"""Discovery of the workers of one machine by their sockets in the runtime directory."""

from __future__ import annotations

import time
from pathlib import Path

from shared import sockets

_COARSE_NS = 100_000_000
"""Resolution of directory timestamps in nanoseconds.

Two changes within some milliseconds may leave the same timestamp.
"""


class WorkerDirectory:
    """Sockets in a directory.

    The directory is read again only when its timestamp changes, because it is polled several times a second.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._endpoints: list[str] = []
        self._seen: int | None = None

    def endpoints(self) -> list[str]:
        """Return the endpoints of the workers' sockets, oldest first. Stale ones may be included."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except FileNotFoundError:
            self._seen = None
            return []
        if changed != self._seen:
            is_settled = time.time_ns() - changed > _COARSE_NS
            self._endpoints = sockets.list_worker_endpoints(self._directory)
            self._seen = changed if is_settled else None
        return self._endpoints
