"""Kernel that reads a shared prefix once; the query tokens of all its requests are rows of one tile."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Product, Target
from kernels.common.triton.launch import NAMED_TYPES, TORCH_TYPES, Variant, product_type
from kernels.ops.attention.cascade import CascadeWork
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import KVFormat, KVPages
from kernels.ops.attention.triton_cells import (
    CellStrides,
    cell_constants,
    cells_of,
    compiled_cells,
    split_constants,
)
from kernels.ops.attention.triton_split import attend_keys, load_queries, store_rows
from kernels.ops.attention_decode.triton import Tile
from kernels.ops.attention_work.inputs import AttentionWork, DecodeScratch


@triton.jit
def attention_cascade_kernel(
    p_sums,
    p_maxima,
    p_weights,
    p_query,
    p_keys,
    p_values,
    p_key_scales,
    p_value_scales,
    p_table,
    p_cu_seqlens,
    p_partials,
    p_members,
    p_items,
    p_ends,
    table_stride,
    scale,
    softcap,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HIGH_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Compute one item for one KV head per program; rows are (query token of any member, head of the group).

    Every row sees every key and writes a partial result to its row of scratch. A request without room in scratch (0
    results) processes the prefix in its own decode item and is skipped here.
    """
    p_item = p_items + tl.program_id(0) * 4
    i_head = tl.program_id(1)
    first_member, num_members = tl.load(p_item), tl.load(p_item + 1)
    begin, index = tl.load(p_item + 2), tl.load(p_item + 3)
    end = tl.load(p_ends + tl.program_id(0))
    o_row = tl.arange(0, ROWS)
    head = i_head * GROUP + o_row % GROUP
    inside = o_row // GROUP < num_members
    p_member = p_members + (first_member + o_row // GROUP) * 2
    request = tl.load(p_member, mask=inside, other=0)
    query = tl.load(p_member + 1, mask=inside, other=0)
    valid = inside & (tl.load(p_partials + request * 2 + 1, mask=inside, other=0) > 0)
    begin_query = tl.load(p_cu_seqlens + request, mask=valid, other=0)
    num_queries = tl.load(p_cu_seqlens + request + 1, mask=valid, other=0) - begin_query
    row = tl.load(p_partials + request * 2, mask=valid, other=0) + index * num_queries + query
    o_query = ((begin_query + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD
    b_queries = load_queries(p_query + o_query, valid, HEAD, WIDTH, FORMAT, PRODUCT)
    row_end = tl.zeros([ROWS], dtype=tl.int32) + end
    m, total, acc, acc_high = attend_keys(
        b_queries,
        begin,
        end,
        row_end,
        row_end,
        p_table + tl.load(p_members + first_member * 2).to(tl.int64) * table_stride,
        p_keys + i_head * KEY_STRIDES[1],
        p_values + i_head * VALUE_STRIDES[1],
        p_key_scales + i_head * SCALE_STRIDES[1],
        p_value_scales + i_head * SCALE_STRIDES[1],
        scale,
        softcap,
        KEY_STRIDES,
        VALUE_STRIDES,
        SCALE_STRIDES,
        PAGE_SIZE,
        HEAD,
        WIDTH,
        HIGH_WIDTH,
        ROWS,
        KEYS,
        FORMAT,
        NATIVE,
        PRODUCT,
        WEIGHT,
        HAS_SOFTCAP,
        HAS_WINDOW,
    )
    o_scratch = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(p_maxima + o_scratch, m, mask=valid)
    tl.store(p_weights + o_scratch, total, mask=valid)
    store_rows(p_sums + o_scratch * HEAD, acc, acc_high, valid, HEAD, WIDTH, FORMAT)


def tile(dtype: torch.dtype, kv_format: KVFormat, head_dim: int, hip: bool = False) -> Tile:
    """Return the launch configuration for a dtype and cell format.

    A tile has half the rows of a prefill tile, because there is no second accumulator, and as many keys as a decode
    tile with many rows.
    """
    if dtype is torch.float32:
        return Tile(keys=16 if head_dim > 128 else 32, num_warps=4, num_stages=2)
    if hip:
        return Tile(keys=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tile(keys=32 if kv_format == "dense" else 16, num_warps=8, num_stages=5)
    return Tile(keys=64, num_warps=8, num_stages=5)


def tile_rows(dtype: torch.dtype, group: int) -> int:
    """Return the rows of a tile, which hold at least one query token of a group."""
    return max(16 if dtype is torch.float32 else 64, int(triton.next_power_of_2(group)))


def members_per_tile(dtype: torch.dtype, geometry: AttentionGeometry) -> int:
    """Return the number of query tokens per item, an argument of cascade_work."""
    group = geometry.num_heads // geometry.num_kv_heads
    return tile_rows(dtype, group) // group


def attention_cascade(
    query: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    work: AttentionWork,
    cascade: CascadeWork,
    scratch: DecodeScratch,
) -> None:
    """Write the partial results over shared prefixes to scratch; attention_decode merges them afterwards.

    Args:
        query: [T, num_heads, head_dim], rotated, contiguous.
        pages: Pages that contain the prefixes.
        inputs: Inputs of the step.
        geometry: Shapes and constants.
        work: Work list of build_work with the cascade's shared_lens.
        cascade: Work list of the shared prefixes.
        scratch: Receives the partial results.

    Raises:
        ValueError: The layer has a window, which does not cover a whole prefix, or the queries have the wrong
            shape.
    """
    if geometry.window is not None:
        raise ValueError(
            f"cascade attention does not support a window, got {geometry.window}; attend without shared prefixes"
        )
    if query.shape[1:] != (geometry.num_heads, geometry.head_dim) or not query.is_contiguous():
        raise ValueError(f"queries must be contiguous with the heads of {geometry}, got shape {tuple(query.shape)}")
    num_items = cascade.items.shape[0]
    if num_items == 0:
        return
    cells = cells_of(pages)
    chosen = tile(query.dtype, pages.format, geometry.head_dim, torch.version.hip is not None)
    _variant(geometry, pages.format, cells.strides, chosen, query.dtype, cells.native)(
        (num_items, geometry.num_kv_heads),
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        query,
        *cells.pointers,
        inputs.block_table,
        inputs.cu_seqlens_q,
        work.partials,
        cascade.members,
        cascade.items,
        cascade.ends,
        inputs.block_table.stride(0),
        float(geometry.scale),
        float(geometry.softcap or 1.0),
    )


@functools.cache
def _variant(
    geometry: AttentionGeometry,
    kv_format: KVFormat,
    strides: CellStrides,
    chosen: Tile,
    dtype: torch.dtype,
    native: bool,
) -> Variant:
    cells = cell_constants(strides, kv_format, native)
    rows = tile_rows(dtype, geometry.num_heads // geometry.num_kv_heads)
    return Variant(attention_cascade_kernel, **_options(geometry, product_type(dtype), cells, rows, chosen))


def _options(
    geometry: AttentionGeometry, product: Any, cells: dict[str, Any], rows: int, chosen: Tile
) -> dict[str, Any]:
    shared = split_constants(geometry, cells["FORMAT"], product)
    return cells | shared | {"ROWS": rows, "KEYS": chosen.keys} | chosen.options


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for Llama's heads in every format, and for the other head sizes and dtypes."""
    formats: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")
    found = [_compilation(target, "bf16", kv_format, 128) for kv_format in formats]
    found += [_compilation(target, "bf16", "dense", size) for size in (64, 80, 96, 256)]
    found += [_compilation(target, "bf16", kv_format, 256) for kv_format in formats[1:]]
    found.append(_compilation(target, "bf16", "fp8", 64))
    return [
        *found,
        _compilation(target, "fp16", "dense", 128),
        _compilation(target, "fp32", "dense", 128),
    ]


def _compilation(target: Target, dtype: Product, kv_format: KVFormat, head_dim: int) -> Compilation:
    geometry = AttentionGeometry(32, 8, head_dim, head_dim, 16, head_dim**-0.5)
    types, cells = compiled_cells(target, dtype, kv_format, geometry)
    types |= {"p_query": f"*{dtype}", "p_sums p_maxima p_weights": "*fp32", "scale softcap": "fp32"}
    types |= {"p_table p_cu_seqlens p_partials p_members p_items p_ends": "*i32"}
    chosen = tile(TORCH_TYPES[dtype], kv_format, head_dim, target == "gfx942")
    rows = tile_rows(TORCH_TYPES[dtype], 4)
    return Compilation(
        "attention_cascade",
        f"{dtype} kv={kv_format} d={head_dim} rows={rows}",
        attention_cascade_kernel,
        types,
        _options(geometry, NAMED_TYPES[dtype], cells, rows, chosen),
        product=dtype,
        rows=rows,
    )
