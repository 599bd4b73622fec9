"""Routing of a request to the worker of its model that has the lowest cost until the first token."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from shared.block_hash import page_hashes

MAX_PAGES_PER_PROMPT = 512
"""Maximum number of pages of a prompt that are hashed for routing.

A longer shared prefix would not change the choice.
"""
MAX_PAGES_PER_WORKER = 65_536
TOKENS_PER_SEQUENCE = 64
"""Tokens of a prompt that take about as long as a running sequence delays the prompt."""


class Load(Protocol):
    """Load of a worker."""

    @property
    def page_size(self) -> int:
        """Tokens per page of its KV cache."""

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens sent to it and not yet computed."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run or wait there."""

    @property
    def name(self) -> str:
        """Name that stays the same when the worker is restarted."""


_W = TypeVar("_W", bound=Load)


class Router:
    """Router that remembers, per worker, hashes of pages of recent prompts.

    The worker's own cache is not consulted. A page that it has evicted costs time, never a wrong result.
    """

    def __init__(self) -> None:
        self._pages: WeakKeyDictionary[Load, OrderedDict[bytes, None]] = WeakKeyDictionary()

    def choose(self, workers: Sequence[_W], token_ids: Sequence[int], salt: bytes, affinity: str = "") -> _W:
        """Return the cheapest of at least one workers and count the prompt as sent there.

        Among equally cheap workers, requests with the same salt and affinity get the same one from every gateway.
        """
        if len(workers) == 1:
            return workers[0]
        hashes: dict[int, list[bytes]] = {}
        for page_size in {worker.page_size for worker in workers}:
            hashes[page_size] = page_hashes(token_ids[: MAX_PAGES_PER_PROMPT * page_size], page_size, salt)

        def cost(worker: _W) -> tuple[int, int, bytes]:
            wish = _rank(worker.name, salt, affinity) if affinity else b""
            return *self._cost(worker, len(token_ids), hashes[worker.page_size]), wish

        best = min(workers, key=cost)
        self._remember(best, hashes[best.page_size])
        return best

    def _cost(self, worker: Load, num_tokens: int, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return the cost in tokens until the first token of this prompt.

        The number of sequences follows, so that workers of equal cost alternate.
        """
        known = self._pages.get(worker) or OrderedDict()
        num_cached = 0
        for page in hashes:
            if page not in known:
                break
            num_cached += worker.page_size
        tokens = worker.waiting_tokens + num_tokens - num_cached + TOKENS_PER_SEQUENCE * worker.num_sequences
        return tokens, worker.num_sequences

    def _remember(self, worker: Load, hashes: Sequence[bytes]) -> None:
        known = self._pages.setdefault(worker, OrderedDict())
        for page in hashes:
            known[page] = None
            known.move_to_end(page)
        while len(known) > MAX_PAGES_PER_WORKER:
            known.popitem(last=False)


def _rank(name: str, salt: bytes, affinity: str) -> bytes:
    """Return the rank of rendezvous hashing (Thaler and Ravishankar 1998).

    The lowest rank wins. A worker more or less moves only the requests that it serves.
    """
    return hashlib.sha256(b"\0".join((name.encode(), salt, affinity.encode("utf-8", "replace")))).digest()
