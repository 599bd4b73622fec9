"""Where the workers of one machine are found: their sockets in the runtime directory."""

from __future__ import annotations

import time
from pathlib import Path

from shared import sockets

_COARSE_NS = 100_000_000
"""What changes a directory twice within some milliseconds may leave its time as it was."""


class WorkerDirectory:
    """The sockets in a directory, which is read again only where its time says that something came or went.

    It is asked some times a second for as long as a gateway lives.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._endpoints: list[str] = []
        self._seen: int | None = None

    def endpoints(self) -> list[str]:
        """Of the workers whose sockets are there, oldest first; stale ones may be among them."""
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
