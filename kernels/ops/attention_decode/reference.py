"""Decode attention in plain torch, one query token at a time, in float64."""

from __future__ import annotations

import torch

from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import KVPages, dequantize_cells


def cells_of_request(pages: KVPages, table: torch.Tensor, length: int, page_size: int) -> list[torch.Tensor]:
    """Return the keys and values [num_kv_heads, length, head_dim] in float64 of the request whose pages are `table`."""
    own = table[: -(-length // page_size)].long()
    gathered = []
    for cells, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        stored = cells[own]
        wide = stored if scales is None else dequantize_cells(stored, scales[own], pages.format)
        gathered.append(wide.double().transpose(0, 1).flatten(1, 2)[:, :length])
    return gathered


def attention_decode(
    query: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    max_decode_queries: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the rows of `out` for requests with a context and at most `max_decode_queries` query tokens.

    Args:
        query: [T, num_heads, head_dim], rotated.
        pages: Keys and values.
        inputs: Inputs of the step.
        geometry: Shapes and constants.
        max_decode_queries: Maximum number of query tokens of a decoding request.
        out: [T, num_heads * head_dim].
        sinks: [num_heads] float32, a score that each head adds to its softmax.
    """
    bounds = inputs.cu_seqlens_q.tolist()
    group = geometry.num_heads // geometry.num_kv_heads
    for r, length in enumerate(inputs.seq_lens.tolist()):
        num_queries = bounds[r + 1] - bounds[r]
        if length == 0 or num_queries > max_decode_queries:
            continue
        keys, values = cells_of_request(pages, inputs.block_table[r], length, geometry.page_size)
        for i in range(num_queries):
            end = length - num_queries + i + 1
            begin = 0 if geometry.window is None else max(0, end - geometry.window)
            row = query[bounds[r] + i].double().view(geometry.num_kv_heads, group, geometry.head_dim)
            scores = row @ keys[:, begin:end].transpose(-1, -2) * geometry.scale
            if geometry.softcap is not None:
                scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
            if sinks is not None:
                sink = sinks.double().view(geometry.num_kv_heads, group, 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : end - begin]
            out[bounds[r] + i] = (weights @ values[:, begin:end]).flatten().to(out.dtype)
