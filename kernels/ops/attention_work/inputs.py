"""Work list of a step's attention: key ranges of the decoding requests, and query tiles of the prefill requests.

It is built on the device from lengths alone, so that a captured graph supports all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPLIT = 256
"""Number of keys of the smallest split, a multiple of every kernel's key tile."""

MAX_SPLITS = 64
"""Maximum number of splits of a request. The split size doubles until this limit is met."""

DECODE_ROWS = 16
"""Rows of the smallest tile of a matrix product. Using all of them costs no more than using one."""


def max_decode_queries(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query tokens of a request that fit the smallest tile of rows: 4 for 4 heads per KV head."""
    return max(1, DECODE_ROWS // (num_heads // num_kv_heads))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Buffers that `build_work` fills for R <= max_requests requests, and the constants of the division.

    A request without context (seq_len 0: padding of a captured graph) or without query tokens has no work. A request
    with at most `max_decode_queries` query tokens is a decoding request; any other is a prefill request. The keys of a
    decoding request are divided at multiples of its split size, which depends only on its own length. Each split has
    one partial result in scratch for each query token of the request, and the partial results are merged in order
    afterwards. A request with a single split, or without room in scratch, is one item that processes all its splits
    with the same arithmetic and writes the result itself. Long requests come first, so that the last items are short.

    Attributes:
        max_decode_queries: Maximum number of query tokens of a decoding request; 0 makes every request a prefill
            request.
        prefill_tile: Query tokens of a prefill tile.
        window: A query sees the last `window` keys including its own; None for all keys.
        scratch_rows: Capacity of scratch in rows of partial results.
        decode_items: [scratch_rows + max_requests, 4] int32: request, first key, split size (keys), first row of
            scratch. A row of -1 denotes all splits from the first key to the end of the context, without scratch.
        prefill_tiles: [max_tokens // prefill_tile + max_requests, 2] int32: request, first query token relative to
            the request's first token of this step. The last tile of a request, which sees the most keys, comes first.
        counts: [2] int32: number of decode items, number of prefill tiles. The rest of the lists is undefined.
        partials: [max_requests, 2] int32: first row of scratch and number of partial results of each query token;
            0 results if there is nothing to merge. Result i of query token j is in row first + i * query tokens + j.
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
        """Maximum number of requests."""
        return self.partials.shape[0]

    def max_prefill_tiles(self, num_tokens: int, num_requests: int) -> int:
        """Return an upper bound of the number of prefill tiles, which is the grid size of the prefill kernel.

        It is known without reading from the device.
        """
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
    """Return buffers for steps of up to `max_requests` requests and `max_tokens` query tokens."""
    if min(max_requests, max_tokens, prefill_tile) < 1 or min(max_decode_queries, scratch_rows) < 0:
        raise ValueError(
            "max_requests, max_tokens and prefill_tile must be at least 1, max_decode_queries and scratch_rows at "
            "least 0"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")

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
    """Return the keys per split of a request that sees `num_keys` keys.

    The size is SPLIT, doubled until there are at most MAX_SPLITS splits.
    """
    size = SPLIT
    while size * MAX_SPLITS < num_keys:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results; row i of each tensor belongs to one query token and one range of keys (AttentionWork.partials).

    Attributes:
        sums: [rows, num_heads, head_dim] float32, sum of exp2(score - maximum) * value.
        maxima: [rows, num_heads] float32, largest score in units of log2; -inf for a range without visible keys.
        weights: [rows, num_heads] float32, sum of exp2(score - maximum).
    """

    sums: torch.Tensor
    maxima: torch.Tensor
    weights: torch.Tensor


def make_scratch(rows: int, num_heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
    """Return uninitialized scratch with `rows` rows. The kernels read only rows that the work list refers to."""
    return DecodeScratch(
        sums=torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty((rows, num_heads), dtype=torch.float32, device=device),
        weights=torch.empty((rows, num_heads), dtype=torch.float32, device=device),
    )
