"""The work list of a step's attention: which queries decode over which keys, and which tiles of queries prefill.

It is built on the device from lengths alone, so that a captured graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPLIT = 256
"""Keys of the smallest split; every kernel's key tile divides it."""

MAX_SPLITS = 64
"""A request whose visible keys would make more splits has them doubled until they do not."""

DECODE_ROWS = 16
"""Rows of the smallest tile of a matrix product; queries times heads of a group that fill it cost nothing more."""


def max_decode_queries(num_heads: int, num_kv_heads: int) -> int:
    """Query tokens of one request that decode in the smallest tile of rows: 4 for four heads a KV head."""
    return max(1, DECODE_ROWS // (num_heads // num_kv_heads))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Buffers that `build_work` fills for R <= max_requests requests, and the constants it fills them by.

    A request without context (seq_len 0: padding of a captured graph) or without queries has no work. One with at most
    `max_decode_queries` query tokens decodes, any other prefills. The keys of a decoding request are cut at multiples
    of its split size, which depends on nothing but its own length. Each split has a partial result for each of its
    query tokens in scratch, merged in order afterwards; a request with one split, or one that scratch has no room for,
    is one item that walks through all its splits, with the same arithmetic, and writes its result itself. Long
    requests come first, so that what is left for the end is short.

    Attributes:
        max_decode_queries: query tokens up to which a request decodes; 0: every request prefills.
        prefill_tile: query tokens of a prefill tile.
        window: a query sees the last `window` keys including its own; None: all.
        scratch_rows: rows of partial results that there is room for.
        decode_items: [scratch_rows + max_requests, 4] int32: request, first key, split size (keys), first row of
            scratch. A row of -1: all splits from the first key to the end of the context, no scratch.
        prefill_tiles: [max_tokens // prefill_tile + max_requests, 2] int32: request, first query token counted from the
            request's first of this step. Of each request the last tile, which sees most keys, comes first.
        counts: [2] int32: decode items, prefill tiles. What follows in the lists is undefined.
        partials: [max_requests, 2] int32: first row of scratch and number of partial results of each query token;
            0 results where nothing is to be merged. Result i of query token j is row first + i * query tokens + j.
    """

    max_decode_queries: int
    prefill_tile: int
    window: int | None
    scratch_rows: int
    decode_items: torch.Tensor
    prefill_tiles: torch.Tensor
    counts: torch.Tensor
    partials: torch.Tensor

    @property
    def max_requests(self) -> int:
        """Requests that the buffers have room for."""
        return self.partials.shape[0]

    def most_prefill_tiles(self, num_tokens: int, num_requests: int) -> int:
        """Bound of the number of prefill tiles, known without reading the device: the grid of the prefill kernel."""
        return min(num_tokens // self.prefill_tile + num_requests, num_tokens)


def make_work(
    max_requests: int,
    max_tokens: int,
    device: torch.device,
    *,
    max_decode_queries: int,
    prefill_tile: int,
    window: int | None = None,
    scratch_rows: int = 4096,
) -> AttentionWork:
    """Buffers for steps of up to `max_requests` requests and `max_tokens` query tokens."""
    if min(max_requests, max_tokens, prefill_tile) < 1 or min(max_decode_queries, scratch_rows) < 0:
        raise ValueError("attention work needs a request, a token and a tile; queries and rows are not negative")
    if window is not None and window < 1:
        raise ValueError(f"an attention window of {window} keys hides a query's own")

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return AttentionWork(
        max_decode_queries=max_decode_queries,
        prefill_tile=prefill_tile,
        window=window,
        scratch_rows=scratch_rows,
        decode_items=ints(scratch_rows + max_requests, 4),
        prefill_tiles=ints(max_tokens // prefill_tile + max_requests, 2),
        counts=ints(2),
        partials=ints(max_requests, 2),
    )


def split_size(num_keys: int) -> int:
    """Keys of a split of a request that sees `num_keys` keys: SPLIT, doubled while that makes more than MAX_SPLITS."""
    size = SPLIT
    while size * MAX_SPLITS < num_keys:
        size *= 2
    return size
