"""Which worker of a model takes a request: the one where it costs least to get to its first token."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from shared.block_hash import page_hashes

MAX_PAGES_PER_PROMPT = 512
"""Pages of a prompt that are hashed for routing; a longer shared prefix decides nothing more."""
MAX_PAGES_PER_WORKER = 65_536
TOKENS_PER_SEQUENCE = 64
"""A running sequence delays a prompt about as much as computing this many more of its tokens."""


class Load(Protocol):
    """What routing asks of a worker."""

    @property
    def page_size(self) -> int: ...
    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens sent there and not yet computed."""
        ...

    @property
    def num_sequences(self) -> int: ...
    @property
    def name(self) -> str:
        """The same for a worker's whole life, and after a restart."""
        ...


_W = TypeVar("_W", bound=Load)


class Router:
    """Remembers, per worker, hashes of pages of prompts lately sent there. The worker's own cache is not asked: what
    it evicted meanwhile costs a detour, never a wrong result."""

    def __init__(self) -> None:
        self._pages: WeakKeyDictionary[Load, OrderedDict[bytes, None]] = WeakKeyDictionary()

    def choose(self, workers: Sequence[_W], token_ids: Sequence[int], salt: bytes, affinity: str = "") -> _W:
        """The cheapest of the workers, of which there is at least one; the prompt counts as sent there.

        Among equally cheap ones, requests with the same salt and affinity have the same one, whichever gateway asks.
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
        """In tokens to compute before the first of this prompt; then by sequences, so that equals take turns."""
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
    """Rendezvous hashing (Thaler and Ravishankar 1998): the lowest rank wins, and a worker more or less moves only the
    requests that go to it."""
    return hashlib.sha256(b"\0".join((name.encode(), salt, affinity.encode("utf-8", "replace")))).digest()
