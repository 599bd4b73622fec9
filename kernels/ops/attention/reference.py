"""Reference implementation of rotary embedding, KV write and paged grouped-query attention in plain torch.

The arithmetic is in float32 or float64.
"""

from __future__ import annotations

import torch

from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages, dequantize_cells, key_cells, quantize_cells, value_cells

# Maximum number of queries of one request that are scored at a time. It bounds the score matrix of a long chunk.
_QUERY_BLOCK = 512


def rotate(heads: torch.Tensor, positions: torch.Tensor, rope_table: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim values of [T, heads, head_dim] (Su et al. 2021) in pairs (i, i + rotary_dim / 2)."""
    rows = rope_table[positions.long()].to(heads.dtype).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    rotary_dim = rows.shape[-1]
    first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, heads[..., rotary_dim:]), dim=-1)


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply an RMS norm to each head of [T, heads, head_dim], in the dtype of `heads`."""
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
    """Write the step's keys and values to their pages and compute causal attention over each request's pages.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], before normalization and rotation.
        pages: Updated in place. Attention reads quantized cells back from the pages. A token with slot -1 is not
            written.
        inputs: Inputs of the step.
        geometry: Shapes and constants.
        layer: Constants of the layer.
        compute_dtype: Dtype of the arithmetic.

    Returns:
        [T, num_heads * head_dim] in the dtype of qkv. Rows of requests with seq_len 0 are undefined.
    """
    query = rotate_and_write(qkv, pages, inputs, geometry, layer, compute_dtype)
    return attend(query, pages, inputs, geometry, layer).to(qkv.dtype)


def attend(
    query: torch.Tensor, pages: KVPages, inputs: AttentionInputs, geometry: AttentionGeometry, layer: LayerConstants
) -> torch.Tensor:
    """Compute attention for rotated queries [T, num_heads, head_dim]; the second half of `paged_attention`.

    The arithmetic is in the dtype of the query.
    """
    num_tokens = query.shape[0]
    if inputs.max_seqlen_q == 1 and num_tokens == inputs.seq_lens.shape[0]:
        visible = inputs.seq_lens.unsqueeze(1)
        out = _attend(query.unsqueeze(2), inputs.block_table, visible, pages, geometry, layer.sinks)
        return out.reshape(num_tokens, -1)
    outputs = [query.new_empty((0, geometry.num_heads * geometry.head_dim))]
    bounds = inputs.cu_seqlens_q.tolist()
    lengths = inputs.seq_lens.tolist()
    for i, length in enumerate(lengths):
        table = inputs.block_table[i : i + 1, : -(-length // geometry.page_size)]
        for start in range(bounds[i], bounds[i + 1], _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, bounds[i + 1])
            visible = inputs.positions[None, start:end] + 1
            part = query[start:end].transpose(0, 1).unsqueeze(0)
            out = _attend(part, table, visible, pages, geometry, layer.sinks)
            outputs.append(out.squeeze(0).transpose(0, 1).reshape(end - start, -1))
    return torch.cat(outputs)


def rotate_and_write(
    qkv: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    layer: LayerConstants,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Rotate and write keys and values, and return the queries; the first half of `paged_attention`.

    The returned queries are normalized and rotated: [T, num_heads, head_dim].
    """
    sizes = [geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads]
    heads = qkv.to(compute_dtype).view(qkv.shape[0], -1, geometry.head_dim)
    query, key, value = heads.split(sizes, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        query = norm_heads(query, layer.q_norm, layer.norm_eps)
        key = norm_heads(key, layer.k_norm, layer.norm_eps)
    query = rotate(query, inputs.positions, inputs.rope_table)
    key = rotate(key, inputs.positions, inputs.rope_table)
    slots = inputs.slot_mapping
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, key, value = slots[kept], key[kept], value[kept]
    page, slot = slots // geometry.page_size, slots % geometry.page_size
    if pages.paired:
        pages.keys[page, :, :, slot] = key.unflatten(-1, (-1, 2)).to(pages.keys.dtype)
        pages.values[page, :, slot // 2, :, slot % 2] = value.to(pages.values.dtype)
        return query
    _write(pages.keys, pages.key_scales, page, slot, key, pages)
    _write(pages.values, pages.value_scales, page, slot, value, pages)
    return query


def _write(
    memory: torch.Tensor,
    scales: torch.Tensor | None,
    page: torch.Tensor,
    slot: torch.Tensor,
    cells: torch.Tensor,
    pages: KVPages,
) -> None:
    """Write the cells of tokens [T, num_kv_heads, head_dim] to their slots."""
    if scales is None:
        memory[page, :, slot] = cells.to(memory.dtype)
        return
    codes, found = quantize_cells(cells, pages.format)
    if codes.dtype is torch.float8_e4m3fn:  # torch cannot scatter this dtype
        memory, codes = memory.view(torch.uint8), codes.view(torch.uint8)
    memory[page, :, slot] = codes
    scales[page, :, slot] = found


def _gather(pages: KVPages, block_table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of block tables [R, P], each [R, num_kv_heads, 1, P * page_size, head_dim]."""
    index = block_table.long()
    found = []
    for memory, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        if scales is None:
            found.append(memory[index].to(dtype))
        else:
            codes = memory.view(torch.uint8)[index].view(memory.dtype)
            found.append(dequantize_cells(codes, scales[index], pages.format).to(dtype))
    if pages.paired:
        found = [key_cells(found[0]), value_cells(found[1])]
    keys, values = (rows.transpose(1, 2).flatten(2, 3).unsqueeze(2) for rows in found)
    return keys, values


def _attend(
    query: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    pages: KVPages,
    geometry: AttentionGeometry,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of queries [R, num_heads, Q, D] over the first `visible` [R, Q] positions of each request.

    Return [R, num_heads, Q, D].
    """
    num_requests, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = geometry.num_kv_heads
    key, value = _gather(pages, block_table, query.dtype)
    grouped = query.view(num_requests, num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)
    scores = grouped @ key.transpose(-1, -2) * geometry.scale
    if geometry.softcap is not None:
        scores = torch.tanh(scores / geometry.softcap) * geometry.softcap
    index = torch.arange(key.shape[-2], device=query.device)
    hidden = index >= visible.unsqueeze(-1)  # [R, Q, positions]
    if geometry.window is not None:
        hidden |= index < visible.unsqueeze(-1) - geometry.window
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if sinks is not None:
        # A sink is one more score of each head, whose value is zero.
        column = sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
    # Unused pages are undefined and may contain NaN, which a weight of zero would not mask.
    seen = (index < visible.amax(dim=1, keepdim=True))[:, None, None, :, None]
    out = weights @ value.masked_fill(~seen, 0.0)
    return out.view(num_requests, num_heads, num_queries, head_dim)
