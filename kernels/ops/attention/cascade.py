"""Detection of requests that share a prefix, on the host, and the work list of the pass over the shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kernels.ops.attention_work.inputs import SPLIT, split_size

MIN_REQUESTS = 4
"""Minimum size of a group. The L2 cache already serves the repeated reads of fewer requests."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Group of requests whose first `num_keys` keys are in the same pages.

    Attributes:
        requests: Indices into the block table, ascending.
        num_keys: Length of the prefix in keys, a multiple of the page size.
    """

    requests: tuple[int, ...]
    num_keys: int

    @property
    def num_saved_keys(self) -> int:
        """Number of key reads that sharing the prefix avoids."""
        return (len(self.requests) - 1) * self.num_keys


@dataclass(frozen=True, slots=True)
class CascadeWork:
    """Work list of the pass over shared prefixes. Its counts are known on the host.

    Attributes:
        members: [M, 2] int32, request and query token (of that request) of each group, one group after the other.
        items: [N, 4] int32: first member, number of members (at most one tile), first key, index of the partial
            result.
        ends: [N] int32, end of each item's keys.
        shared_lens: [R] int32, argument of build_work: number of keys covered by the shared pass for each request;
            0 for none.
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
    """Return groups of at least `min_requests` requests whose first `min_keys` or more keys are in the same pages.

    Requests are sorted by their pages, so that adjacent requests share the longest prefixes. Among the divisions at
    the shortest shared prefixes, the function chooses the one that saves the most page reads.

    Args:
        block_tables: [R, pages] of integers.
        num_full_pages: [R], full pages of each request before its first query token; 0 excludes the request.
        page_size: Tokens per page.
        min_requests: Smallest size of a group.
        min_keys: Smallest length of a prefix.

    Raises:
        ValueError: `min_keys` or `min_requests` is too small (see AttentionWork), or the shapes differ.
    """
    if min_keys < SPLIT or min_requests < 2:
        raise ValueError(
            f"min_keys must be at least {SPLIT} and min_requests at least 2, got {min_keys} and {min_requests}"
        )
    if block_tables.ndim != 2 or num_full_pages.shape != block_tables.shape[:1]:
        raise ValueError(
            f"num_full_pages has shape {num_full_pages.shape}, which does not match block tables {block_tables.shape}"
        )
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
    order = np.array(sorted(range(len(rows)), key=rows.__getitem__))  # any order that makes equal prefixes adjacent
    tables, candidates = tables[order], candidates[order]
    different = (tables[1:] != tables[:-1]) | (tables[1:] < 0)
    common = np.where(different.any(axis=1), different.argmax(axis=1), width)
    found = _best_groups(np.where(common >= min_pages, common, 0), 0, candidates.size, min_requests)
    return [SharedPrefix(tuple(sorted(candidates[members].tolist())), pages * page_size) for members, pages in found]


def _best_groups(common: np.ndarray, start: int, end: int, min_requests: int) -> list[tuple[list[int], int]]:
    """Return the groups among start .. end - 1 with their numbers of pages.

    common[i] is the number of pages that requests i and i + 1 share. The requests either form one group, or are
    divided where they share the fewest pages. The requests that are in no group of a part form one group. Shared
    lengths that differ by less than a fifth are divided at the same level, which bounds the recursion depth.
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
    """Return the work list of disjoint groups.

    Args:
        groups: Groups of requests; no request is in two of them.
        num_queries: [R] query tokens of each request; members of a group must be decoding (see AttentionWork).
        members_per_tile: Members per tile, chosen by the launcher for the geometry.
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
                raise ValueError(f"request {request} is in two shared-prefix groups; groups must be disjoint")
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
