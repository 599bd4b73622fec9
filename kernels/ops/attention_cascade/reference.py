"""Partial results over shared prefixes in plain torch, one query token at a time, in float64."""

from __future__ import annotations

import torch

from kernels.ops.attention.cascade import SharedPrefix
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.attention_decode.reference import cells_of_request
from kernels.ops.attention_work.inputs import split_size

_LOG2_E = 1.4426950408889634


def partial_results(
    query: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    group: SharedPrefix,
    request: int,
    i_query: int,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the partial results (maxima, weights, sums) for each split of the group's prefix.

    The shapes are [num_heads], [num_heads] and [num_heads, head_dim]. The values are float64 and have the meaning given
    in kernels/ops/attention_work/inputs.py.
    """
    keys, values = cells_of_request(pages, inputs.block_table[request], group.num_keys, geometry.page_size)
    row = query[int(inputs.cu_seqlens_q[request]) + i_query].double()
    row = row.view(geometry.num_kv_heads, -1, geometry.head_dim)
    scores = row @ keys.transpose(-1, -2) * geometry.scale
    if geometry.softcap is not None:
        scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
    found = []
    for start in range(0, group.num_keys, split_size(group.num_keys)):
        end = start + split_size(group.num_keys)
        part = scores[..., start:end]
        maxima = part.amax(dim=-1, keepdim=True)
        weights = torch.exp(part - maxima)
        sums = weights @ values[:, start:end]
        found.append((maxima.flatten() * _LOG2_E, weights.sum(dim=-1).flatten(), sums.flatten(0, 1)))
    return found
