"""Reference implementation of the work list as a loop over requests, on the host."""

from __future__ import annotations

import torch

from kernels.ops.attention_work.inputs import AttentionWork, split_size


def build_work(
    cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, work: AttentionWork, shared_lens: torch.Tensor | None = None
) -> None:
    """Fill the buffers of `work`; see AttentionWork.

    Args:
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32, context including this step's tokens.
        work: Buffers to fill.
        shared_lens: [R] int32, number of keys at the start of a decoding request that
            kernels/ops/attention_cascade processes. They are before the request's first query. A nonzero value
            requires that there is no window. Their partial results come first.
    """
    num_requests = seq_lens.shape[0]
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    shared = [0] * num_requests if shared_lens is None else shared_lens.tolist()
    decoding: list[tuple[int, int]] = []
    tiles: list[tuple[int, int]] = []
    partials = [(0, 0)] * num_requests
    for r, length in enumerate(lengths):
        queries = bounds[r + 1] - bounds[r]
        if length > 0 and 0 < queries <= work.max_decode_queries:
            first = 0 if work.window is None else max(0, length - queries - work.window + 1)
            decoding.append((split_size(length - first), r))
        elif length > 0:
            tiles += [(r, start) for start in reversed(range(0, queries, work.prefill_tile))]
    items: list[tuple[int, int, int, int]] = []
    row = 0
    for size, r in sorted(decoding, key=lambda pair: (-pair[0], pair[1])):
        queries = bounds[r + 1] - bounds[r]
        first = 0 if work.window is None else max(0, lengths[r] - queries - work.window + 1)
        start = first // size * size
        merged = -(-shared[r] // split_size(shared[r])) if shared[r] else 0
        starts = list(range(shared[r] or start, lengths[r], size))
        results = merged + len(starts)
        rows = results * queries if results > 1 else 0
        if rows and row + rows <= work.scratch_rows:
            partials[r] = (row, results)
            items += [(r, key, size, row + (merged + i) * queries) for i, key in enumerate(starts)]
        else:
            items.append((r, start, size, -1))
        row += rows
    for buffer, rows_of in ((work.decode_items, items), (work.prefill_tiles, tiles), (work.partials, partials)):
        if rows_of:
            buffer[: len(rows_of)] = torch.tensor(rows_of, dtype=torch.int32)
    work.counts[0], work.counts[1] = len(items), len(tiles)
