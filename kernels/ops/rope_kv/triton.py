"""Norm of query and key heads, rotation, and the write to the KV cache: one program per token and KV head."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import Compilation, Product, Target
from kernels.common.triton.formats import encode_fp8, encode_int4, encode_int8
from kernels.common.triton.launch import FLOAT_NAMES, Variant
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import LARGEST, KVFormat, KVPages
from kernels.ops.attention.triton_cells import CellStrides, cell_constants, cells_of, compiled_cells

NUM_WARPS = 1
"""One warp holds the queries of a group, and many programs share a multiprocessor.

The value does not depend on the number of tokens, because the order of a norm's sum must not depend on the batch.
"""


@triton.jit
def partner_of(o_dim, ROTARY: tl.constexpr):
    """Return the rotation partner of each dimension, in pairs (i, i + ROTARY / 2)."""
    return tl.where(o_dim < ROTARY // 2, o_dim + ROTARY // 2, o_dim - ROTARY // 2)


@triton.jit
def rotated(x, partner, p_row, o_dim, ROTARY: tl.constexpr):
    """Return x * cos -+ partner * sin, with a minus in the first half of the rotary dimensions."""
    rotates = o_dim < ROTARY
    o_angle = o_dim % (ROTARY // 2)
    cos = tl.load(p_row + o_angle, mask=rotates, other=1.0)
    sin = tl.load(p_row + ROTARY // 2 + o_angle, mask=rotates, other=0.0)
    return x * cos + partner * tl.where(o_dim < ROTARY // 2, -sin, sin)


@triton.jit
def rotate_heads(
    p_heads, o_head, head_mask, p_norm, eps, p_row,
    DIM: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Load heads at p_heads + o_head * DIM, then normalize and rotate them in float32.

    Return their two halves, each [heads, HALF].
    """
    o_low = tl.arange(0, HALF)
    o_high = o_low + DIM // 2
    in_half = o_low < DIM // 2
    mask = head_mask[:, None] & in_half[None, :]
    p_cells = p_heads + o_head[:, None] * DIM
    low = tl.load(p_cells + o_low[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(p_cells + o_high[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTARY == DIM:
        low_partner, high_partner = high, low
    else:
        o_low_partner, o_high_partner = partner_of(o_low, ROTARY), partner_of(o_high, ROTARY)
        low_mask = mask & (o_low < ROTARY)[None, :]
        high_mask = mask & (o_high < ROTARY)[None, :]
        low_partner = tl.load(p_cells + o_low_partner[None, :], mask=low_mask, other=0.0).to(tl.float32)
        high_partner = tl.load(p_cells + o_high_partner[None, :], mask=high_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        low_weight = tl.load(p_norm + o_low, mask=in_half, other=0.0)
        high_weight = tl.load(p_norm + o_high, mask=in_half, other=0.0)
        low = low * factor * low_weight[None, :]
        high = high * factor * high_weight[None, :]
        if ROTARY == DIM:
            low_partner, high_partner = high, low
        else:
            low_weight = tl.load(p_norm + o_low_partner, mask=in_half & (o_low < ROTARY), other=0.0)
            high_weight = tl.load(p_norm + o_high_partner, mask=in_half & (o_high < ROTARY), other=0.0)
            low_partner = low_partner * factor * low_weight[None, :]
            high_partner = high_partner * factor * high_weight[None, :]
    return (
        rotated(low, low_partner, p_row, o_low[None, :], ROTARY),
        rotated(high, high_partner, p_row, o_high[None, :], ROTARY),
    )


@triton.jit
def write_cell(
    p_cell, p_scale, low, high, stride_dim,
    DIM: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr, LARGEST_CODE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write one cell, given as float32 halves [1, HALF], in its format, and its scale to p_scale."""
    o_low = tl.arange(0, HALF)[None, :]
    mask = o_low < DIM // 2
    p_low = p_cell + o_low * stride_dim
    p_high = p_cell + (o_low + DIM // 2) * stride_dim
    if FORMAT == "dense":
        tl.store(p_low, rounded(low, p_cell.dtype.element_ty), mask=mask)
        tl.store(p_high, rounded(high, p_cell.dtype.element_ty), mask=mask)
    else:
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)))
        # The maximum ignores NaN, but a cell that contains NaN must read back as NaN.
        bad = tl.max(((low != low) | (high != high)).to(tl.int32))
        scale = tl.where(bad > 0, float("nan"), tl.div_rn(largest, LARGEST_CODE))
        divisor = tl.where(largest > 0.0, scale, 1.0)
        low = tl.div_rn(low, tl.zeros_like(low) + divisor)
        high = tl.div_rn(high, tl.zeros_like(high) + divisor)
        # The scale is NaN in that case, and the codes must be numbers.
        low, high = tl.where(low == low, low, 0.0), tl.where(high == high, high, 0.0)
        tl.store(p_scale, scale)
        if FORMAT == "int4":
            tl.store(p_low, encode_int4(low, high), mask=mask)
        elif FORMAT == "int8":
            tl.store(p_low, encode_int8(low), mask=mask)
            tl.store(p_high, encode_int8(high), mask=mask)
        else:
            tl.store(p_low, encode_fp8(low, NATIVE), mask=mask)
            tl.store(p_high, encode_fp8(high, NATIVE), mask=mask)


@triton.jit
def rope_kv_kernel(
    p_qkv, p_queries, p_keys, p_values, p_key_scales, p_value_scales, p_positions, p_slots, p_rope, p_q_norm, p_k_norm,
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP_TILE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    ROTARY: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr,
    HAS_NORM: tl.constexpr, FORMAT: tl.constexpr, LARGEST_CODE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Process one token and KV head; see `rope_kv`. *_STRIDES: strides of page, head, slot (and dimension)."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    position = tl.load(p_positions + i_token).to(tl.int64)
    slot = tl.load(p_slots + i_token)
    p_row = p_rope + position * ROTARY
    p_heads = p_qkv + i_token * ((HEADS + 2 * KV_HEADS) * DIM)
    o_group = tl.arange(0, GROUP_TILE)
    in_group = o_group < GROUP
    o_query = i_head * GROUP + o_group
    low, high = rotate_heads(p_heads, o_query, in_group, p_q_norm, eps, p_row, DIM, HALF, ROTARY, HAS_NORM)
    o_low = tl.arange(0, HALF)
    mask = in_group[:, None] & (o_low < DIM // 2)[None, :]
    p_query = p_queries + i_token * (HEADS * DIM) + o_query[:, None] * DIM + o_low[None, :]
    tl.store(p_query, rounded(low, p_queries.dtype.element_ty), mask=mask)
    tl.store(p_query + DIM // 2, rounded(high, p_queries.dtype.element_ty), mask=mask)
    if slot >= 0:
        page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
        i_cell = i_head.to(tl.int64)
        one = tl.arange(0, 1)
        key_low, key_high = rotate_heads(
            p_heads, HEADS + i_head + one, one == 0, p_k_norm, eps, p_row, DIM, HALF, ROTARY, HAS_NORM
        )
        p_key = p_keys + page * KEY_STRIDES[0] + i_cell * KEY_STRIDES[1] + place * KEY_STRIDES[2]
        p_scale = p_key_scales + page * SCALE_STRIDES[0] + i_cell * SCALE_STRIDES[1] + place * SCALE_STRIDES[2]
        write_cell(p_key, p_scale, key_low, key_high, KEY_STRIDES[3], DIM, HALF, FORMAT, LARGEST_CODE, NATIVE)
        p_given = p_heads + (HEADS + KV_HEADS + i_head) * DIM + o_low[None, :]
        in_half = (o_low < DIM // 2)[None, :]
        value_low = tl.load(p_given, mask=in_half, other=0.0).to(tl.float32)
        value_high = tl.load(p_given + DIM // 2, mask=in_half, other=0.0).to(tl.float32)
        p_value = p_values + page * VALUE_STRIDES[0] + i_cell * VALUE_STRIDES[1] + place * VALUE_STRIDES[2]
        p_scale = p_value_scales + page * SCALE_STRIDES[0] + i_cell * SCALE_STRIDES[1] + place * SCALE_STRIDES[2]
        write_cell(p_value, p_scale, value_low, value_high, VALUE_STRIDES[3], DIM, HALF, FORMAT, LARGEST_CODE, NATIVE)


def rope_kv(
    qkv: torch.Tensor, pages: KVPages, inputs: AttentionInputs, geometry: AttentionGeometry, layer: LayerConstants
) -> torch.Tensor:
    """Write keys and values and return the rotated queries: `rotate_and_write` of kernels/ops/attention/reference.py.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous.
        pages: Updated in place; a token with slot -1 is not written.
        inputs: Inputs of the step.
        geometry: Shapes and constants.
        layer: Constants of the layer.

    Returns:
        [T, num_heads, head_dim] in the dtype of qkv.

    Raises:
        ValueError: qkv has the wrong shape or is not contiguous, or the head or rotary size is odd.
    """
    num_tokens, dim = qkv.shape[0], geometry.head_dim
    if qkv.shape[1] != (geometry.num_heads + 2 * geometry.num_kv_heads) * dim or not qkv.is_contiguous():
        raise ValueError(
            f"qkv must consist of contiguous heads, got shape {list(qkv.shape)} with strides {list(qkv.stride())}"
        )
    if dim % 2 or geometry.rotary_dim % 2 or not 0 < geometry.rotary_dim <= dim:
        raise ValueError(
            f"head_dim and rotary_dim must be even and rotary_dim <= head_dim, got {dim} and {geometry.rotary_dim}"
        )
    queries = torch.empty((num_tokens, geometry.num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return queries
    norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
    cells = cells_of(pages)
    variant = _variant(geometry, cells.strides, norms is not None, pages.format, cells.native)
    variant(
        (num_tokens, geometry.num_kv_heads),
        qkv, queries, *cells.pointers, inputs.positions, inputs.slot_mapping, inputs.rope_table,
        *(norms or (queries, queries)), float(layer.norm_eps),
    )  # fmt: skip
    return queries


@functools.cache
def _variant(
    geometry: AttentionGeometry, strides: CellStrides, has_norm: bool, kv_format: KVFormat, native: bool
) -> Variant:
    return Variant(rope_kv_kernel, **_options(geometry, has_norm, cell_constants(strides, kv_format, native)))


def _options(geometry: AttentionGeometry, has_norm: bool, cells: dict[str, Any]) -> dict[str, Any]:
    return cells | {
        "HEADS": geometry.num_heads,
        "KV_HEADS": geometry.num_kv_heads,
        "GROUP_TILE": triton.next_power_of_2(geometry.num_heads // geometry.num_kv_heads),
        "DIM": geometry.head_dim,
        "HALF": triton.next_power_of_2(geometry.head_dim // 2),
        "ROTARY": geometry.rotary_dim,
        "PAGE_SIZE": geometry.page_size,
        "HAS_NORM": has_norm,
        "LARGEST_CODE": LARGEST.get(cells["FORMAT"], 0.0),
        "num_warps": NUM_WARPS,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for each dtype and cell format at the shape of Llama 3.1 8B, and for other features.

    The features are norms, partial rotation and odd head counts.
    """
    llama = AttentionGeometry(32, 8, 128, 128, 16, 128**-0.5)
    formats: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")
    found = [_compilation(target, dtype, kv, llama, False) for dtype in FLOAT_NAMES.values() for kv in formats]
    others = [
        AttentionGeometry(32, 8, 64, 64, 16, 0.125),
        AttentionGeometry(32, 32, 80, 32, 16, 80**-0.5),
        AttentionGeometry(32, 32, 96, 96, 16, 96**-0.5),
        AttentionGeometry(8, 4, 256, 256, 16, 0.0625),
        AttentionGeometry(28, 4, 128, 128, 16, 128**-0.5),
    ]
    found += [_compilation(target, "bf16", kv, geometry, False) for geometry in others for kv in formats]
    return found + [_compilation(target, "bf16", kv, llama, True) for kv in formats]


def _compilation(
    target: Target, dtype: Product, kv: KVFormat, geometry: AttentionGeometry, has_norm: bool
) -> Compilation:
    types, cells = compiled_cells(target, dtype, kv, geometry)
    group = geometry.num_heads // geometry.num_kv_heads
    name = f"{dtype} kv={kv} d={geometry.head_dim} rotary={geometry.rotary_dim} g={group}"
    types |= {"p_qkv p_queries": f"*{dtype}", "p_positions": "*i32", "p_slots": "*i64", "p_rope": "*fp32"}
    types |= {"p_q_norm p_k_norm": "*fp32" if has_norm else f"*{dtype}", "eps": "fp32"}
    options = _options(geometry, has_norm, cells)
    return Compilation("rope_kv", name + (" norm" if has_norm else ""), rope_kv_kernel, types, options)
