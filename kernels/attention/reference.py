"""Rotary embedding, KV write and paged grouped-query attention in plain torch, arithmetic in float32 or float64."""

from __future__ import annotations

import torch

from kernels.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.attention.kv_pages import KVPages

# Queries of one request that are scored at a time: bounds the score matrix of a long chunk.
_QUERY_BLOCK = 512


def rotate(heads: torch.Tensor, positions: torch.Tensor, rope_table: torch.Tensor) -> torch.Tensor:
    """Rotates the first rotary_dim values of [T, heads, head_dim] (Su et al. 2021) in pairs (i, i + rotary_dim / 2)."""
    rows = rope_table[positions.long()].to(heads.dtype).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    rotary_dim = rows.shape[-1]
    first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, heads[..., rotary_dim:]), dim=-1)


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each head of [T, heads, head_dim], in the dtype of `heads`."""
    scale = torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + eps)
    return heads * scale * weight.to(heads.dtype)


def paged_attention(
    qkv: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    layer: LayerConstants,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Writes the step's keys and values to their pages and attends causally to each request's pages.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], neither normed nor rotated.
        pages: updated in place.

    Returns:
        [T, num_heads * head_dim] of qkv's dtype.
    """
    num_tokens = qkv.shape[0]
    sizes = [geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads]
    heads = qkv.to(compute_dtype).view(num_tokens, -1, geometry.head_dim)
    query, key, value = heads.split(sizes, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        query = norm_heads(query, layer.q_norm, layer.norm_eps)
        key = norm_heads(key, layer.k_norm, layer.norm_eps)
    keys, values = pages.keys, pages.values
    query = rotate(query, inputs.positions, inputs.rope_table)
    key = rotate(key, inputs.positions, inputs.rope_table)
    page = inputs.slot_mapping // geometry.page_size
    slot = inputs.slot_mapping % geometry.page_size
    keys[page, :, slot] = key.to(keys.dtype)
    values[page, :, slot] = value.to(values.dtype)
    if inputs.max_seqlen_q == 1:
        out = _attend(query.unsqueeze(2), inputs.block_table, inputs.seq_lens.unsqueeze(1), keys, values, geometry)
        return out.reshape(num_tokens, -1).to(qkv.dtype)
    outputs = []
    bounds = inputs.cu_seqlens_q.tolist()
    lengths = inputs.seq_lens.tolist()
    for i, length in enumerate(lengths):
        table = inputs.block_table[i : i + 1, : -(-length // geometry.page_size)]
        for start in range(bounds[i], bounds[i + 1], _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, bounds[i + 1])
            visible = inputs.positions[None, start:end] + 1
            part = query[start:end].transpose(0, 1).unsqueeze(0)
            out = _attend(part, table, visible, keys, values, geometry)
            outputs.append(out.squeeze(0).transpose(0, 1).reshape(end - start, -1))
    return torch.cat(outputs).to(qkv.dtype)


def _attend(
    query: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    geometry: AttentionGeometry,
) -> torch.Tensor:
    """[R, num_heads, Q, D] queries that see their first `visible` [R, Q] positions -> [R, num_heads, Q, D]."""
    num_requests, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = geometry.num_kv_heads
    gathered = []
    for pages in (keys, values):
        rows = pages[block_table.long()].to(query.dtype)  # [R, P, num_kv_heads, page_size, D]
        gathered.append(rows.transpose(1, 2).reshape(num_requests, num_kv_heads, 1, -1, head_dim))
    key, value = gathered
    grouped = query.view(num_requests, num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)
    scores = grouped @ key.transpose(-1, -2) * geometry.scale
    if geometry.softcap is not None:
        scores = torch.tanh(scores / geometry.softcap) * geometry.softcap
    index = torch.arange(key.shape[-2], device=query.device)
    hidden = index >= visible.unsqueeze(-1)  # [R, Q, positions]
    if geometry.window is not None:
        hidden |= index < visible.unsqueeze(-1) - geometry.window
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    # Pages past a request's own may hold anything, NaN too, which a weight of zero would not hide.
    seen = (index < visible.amax(dim=1, keepdim=True))[:, None, None, :, None]
    out = torch.softmax(scores, dim=-1) @ value.masked_fill(~seen, 0.0)
    return out.view(num_requests, num_heads, num_queries, head_dim)
