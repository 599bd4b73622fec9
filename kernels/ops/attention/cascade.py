"""Requests that share a prefix, found on the host, and the work list of the pass over the prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kernels.ops.attention_work.inputs import SPLIT, split_size

MIN_REQUESTS = 4
"""Fewer requests read a prefix as fast individually, because it stays in the second-level cache."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests whose first `num_keys` keys are in the same pages.

    Attributes:
        requests: Indices into the block table, ascending.
        num_keys: A multiple of the page size.
    """

    requests: tuple[int, ...]
    num_keys: int

    @property
    def num_saved_keys(self) -> int:
        """Number of keys that are read once instead of once per request."""
        return (len(self.requests) - 1) * self.num_keys


@dataclass(frozen=True, slots=True)
class CascadeWork:
    """Work of the pass over shared prefixes; its counts are on the host, which computed them.

    Attributes:
        members: [M, 2] int32, request and query token (of that request) of each group, one group after the other.
        items: [N, 4] int32: first member, members (at most a tile's), first key, index of the partial result.
        ends: [N] int32, end of each item's keys.
        shared_lens: [R] int32, argument of build_work: keys that are computed for each request; 0 for none.
    """

    members: torch.Tensor
    items: torch.Tensor
    ends: torch.Tensor
    shared_lens: torch.Tensor


def shared_prefixes(
    block_tables: np.ndarray,
    num_full_pages: np.ndarray,
    page_size: int,
    *,
    min_requests: int = MIN_REQUESTS,
    min_keys: int = 2 * SPLIT,
) -> list[SharedPrefix]:
    """Return groups of at least `min_requests` requests with the same first pages and `min_keys` keys or more.

    Sorted by their pages, adjacent requests share most. Among the ways to separate them where they share least, the
    one that saves most page reads is chosen.

    Args:
        block_tables: [R, pages] of integers.
        num_full_pages: [R], pages of each request that are full and before its first query token; 0 to exclude it.
        page_size: Tokens per page.
        min_requests: Smallest size of a group.
        min_keys: Smallest length of a prefix.

    Raises:
        ValueError: A prefix is too short to be merged (see AttentionWork), or shapes differ.
    """
    if min_keys < SPLIT or min_requests < 2:
        raise ValueError(
            f"a shared prefix needs at least {SPLIT} keys and two requests, not {min_keys}, {min_requests}"
        )
    if block_tables.ndim != 2 or num_full_pages.shape != block_tables.shape[:1]:
        raise ValueError(f"{num_full_pages.shape} page counts do not fit block tables of {block_tables.shape}")
    min_pages = -(-min_keys // page_size)
    candidates = np.flatnonzero(num_full_pages >= min_pages)
    if candidates.size < min_requests:
        return []
    _, same, sizes = np.unique(block_tables[candidates, 0], return_inverse=True, return_counts=True)
    candidates = candidates[sizes[same] >= min_requests]
    if not candidates.size:
        return []
    width = int(num_full_pages[candidates].max())
    tables = block_tables[candidates, :width].astype(np.int32)
    tables[np.arange(width) >= num_full_pages[candidates, None]] = -1
    rows = [row.tobytes() for row in tables]
    order = np.array(sorted(range(len(rows)), key=rows.__getitem__))  # any order that puts equal beginnings together
    tables, candidates = tables[order], candidates[order]
    different = (tables[1:] != tables[:-1]) | (tables[1:] < 0)
    common = np.where(different.any(axis=1), different.argmax(axis=1), width)
    found = _best_groups(np.where(common >= min_pages, common, 0), 0, candidates.size, min_requests)
    return [SharedPrefix(tuple(sorted(candidates[members].tolist())), pages * page_size) for members, pages in found]


def _best_groups(common: np.ndarray, start: int, end: int, min_requests: int) -> list[tuple[list[int], int]]:
    """Return groups among start .. end - 1 and their pages; common[i] is the number of pages that i and i + 1 share.

    Either all form one group, or they are separated where they share least, and requests without a group in a part
    form one. Shares that differ by less than a fifth are separated together, so that there are few levels.
    """
    if end - start < min_requests:
        return []
    shares = common[start : end - 1]
    pages = int(shares.min())
    together = [(list(range(start, end)), pages)] if pages else []
    if pages == int(shares.max()):
        return together
    cuts = (start + 1 + np.flatnonzero(shares * 5 <= pages * 6)).tolist()
    apart: list[tuple[list[int], int]] = []
    for first, last in pairwise([start, *cuts, end]):
        apart += _best_groups(common, first, last, min_requests)
    taken = {member for members, _ in apart for member in members}
    rest = [member for member in range(start, end) if member not in taken]
    if pages and len(rest) >= min_requests:
        apart.append((rest, pages))
    return together if _saved(together) >= _saved(apart) else apart


def _saved(groups: list[tuple[list[int], int]]) -> int:
    """Return the number of page reads that groups save."""
    return sum((len(members) - 1) * pages for members, pages in groups)


def cascade_work(
    groups: Sequence[SharedPrefix], num_queries: Sequence[int], members_per_tile: int, device: torch.device
) -> CascadeWork:
    """Return the work list of groups that share no request.

    Args:
        groups: The groups.
        num_queries: [R] query tokens of each request; members of a group must decode (see AttentionWork).
        members_per_tile: Number given by the launcher for the geometry.
        device: Device of the tensors.

    Raises:
        ValueError: A request is in two groups.
    """
    members: list[tuple[int, int]] = []
    items: list[tuple[int, int, int, int]] = []
    ends: list[int] = []
    shared = [0] * len(num_queries)
    for group in groups:
        first = len(members)
        for request in group.requests:
            if shared[request]:
                raise ValueError(f"request {request} has two shared prefixes")
            shared[request] = group.num_keys
            members += [(request, query) for query in range(num_queries[request])]
        size = split_size(group.num_keys)
        for i, key in enumerate(range(0, group.num_keys, size)):
            for member in range(first, len(members), members_per_tile):
                items.append((member, min(members_per_tile, len(members) - member), key, i))
                ends.append(min(key + size, group.num_keys))

    def ints(values: object, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).reshape(shape).to(device)

    return CascadeWork(ints(members, -1, 2), ints(items, -1, 4), ints(ends, -1), ints(shared, -1))
