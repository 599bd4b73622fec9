"""Decode attention over paged keys and values: each program processes a work item of one KV head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Product, Target
from kernels.common.triton.launch import NAMED_TYPES, TORCH_TYPES, Variant, num_processors, product_type
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import KVFormat, KVPages
from kernels.ops.attention.triton_cells import (
    CellStrides,
    cell_constants,
    cells_of,
    compiled_cells,
    split_constants,
)
from kernels.ops.attention.triton_split import attend_keys, load_queries, merge_weights, normalizer, store_rows
from kernels.ops.attention_work.inputs import DECODE_ROWS, SPLIT, AttentionWork, DecodeScratch

MAX_ROWS = 128
"""Maximum number of rows of a tile: query tokens times heads of a group."""


@triton.jit(do_not_specialize=["window"])
def attention_decode_kernel(
    p_out,
    p_sums,
    p_maxima,
    p_weights,
    p_query,
    p_keys,
    p_values,
    p_key_scales,
    p_value_scales,
    p_sinks,
    p_table,
    p_cu_seqlens,
    p_seq_lens,
    p_items,
    p_counts,
    table_stride,
    scale,
    softcap,
    window,
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
    HAS_SINKS: tl.constexpr,
):
    """Process the pairs (item, KV head) with a static grid; rows of a tile are (query token, head of the group).

    Each split of an item starts with empty sums and is then merged into the previous splits, exactly as the reduction
    kernel does. A result is therefore bitwise the same whether or not its splits were separate items.
    """
    o_row = tl.arange(0, ROWS)
    query = o_row // GROUP
    for i_work in range(tl.program_id(0), tl.load(p_counts) * KV_HEADS, tl.num_programs(0)):
        i_head = i_work % KV_HEADS
        head = i_head * GROUP + o_row % GROUP
        p_item = p_items + (i_work // KV_HEADS) * 4
        request, first, size, row = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
        begin_query = tl.load(p_cu_seqlens + request)
        num_queries = tl.load(p_cu_seqlens + request + 1) - begin_query
        length = tl.load(p_seq_lens + request)
        valid = query < num_queries
        row_end = tl.where(valid, length - num_queries + query + 1, 0)
        row_begin = row_end - window
        o_query = ((begin_query + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD
        b_queries = load_queries(p_query + o_query, valid, HEAD, WIDTH, FORMAT, PRODUCT)
        last = length
        if row >= 0:
            last = tl.minimum(first + size, length)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        acc_high = tl.zeros([ROWS, HIGH_WIDTH], dtype=tl.float32)
        for split in range(first, last, size):
            begin = split
            if HAS_WINDOW:
                begin = tl.maximum(split, tl.maximum(length - num_queries + 1 - window, 0) // KEYS * KEYS)
            split_m, split_total, split_acc, split_high = attend_keys(
                b_queries,
                begin,
                tl.minimum(split + size, last),
                row_begin,
                row_end,
                p_table + request.to(tl.int64) * table_stride,
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
            m, kept, added = merge_weights(m, split_m)
            total = total * kept + split_total * added
            acc = acc * kept[:, None] + split_acc * added[:, None]
            if FORMAT == "int4":
                acc_high = acc_high * kept[:, None] + split_high * added[:, None]
        if row >= 0:
            o_scratch = (row + query).to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(p_maxima + o_scratch, m, mask=valid)
            tl.store(p_weights + o_scratch, total, mask=valid)
            store_rows(p_sums + o_scratch * HEAD, acc, acc_high, valid, HEAD, WIDTH, FORMAT)
        else:
            factor = normalizer(m, total, p_sinks, head, valid, HAS_SINKS)[:, None]
            store_rows(p_out + o_query, acc * factor, acc_high * factor, valid, HEAD, WIDTH, FORMAT)


@triton.jit
def attention_reduce_kernel(
    p_out,
    p_sums,
    p_maxima,
    p_weights,
    p_sinks,
    p_cu_seqlens,
    p_partials,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the partial results for the heads of one query token and one KV head, in order."""
    request = tl.program_id(0)
    i_query = tl.program_id(1)
    num_results = tl.load(p_partials + request * 2 + 1)
    if num_results > 0:
        begin_query = tl.load(p_cu_seqlens + request)
        num_queries = tl.load(p_cu_seqlens + request + 1) - begin_query
        if i_query < num_queries:
            o_group = tl.arange(0, GROUP_ROWS)
            valid = o_group < GROUP
            head = tl.program_id(2) * GROUP + o_group
            first_row = tl.load(p_partials + request * 2) + i_query
            o_dim = tl.arange(0, WIDTH)
            mask = valid[:, None] & (o_dim < HEAD)[None, :]
            m = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
            total = tl.zeros([GROUP_ROWS], dtype=tl.float32)
            acc = tl.zeros([GROUP_ROWS, WIDTH], dtype=tl.float32)
            for i in tl.range(0, num_results, num_stages=4):
                o_scratch = (first_row + i * num_queries).to(tl.int64) * (KV_HEADS * GROUP) + head
                other_m = tl.load(p_maxima + o_scratch, mask=valid, other=float("-inf"))
                other_total = tl.load(p_weights + o_scratch, mask=valid, other=0.0)
                other = tl.load(p_sums + (o_scratch * HEAD)[:, None] + o_dim[None, :], mask=mask, other=0.0)
                m, kept, added = merge_weights(m, other_m)
                total = total * kept + other_total * added
                acc = acc * kept[:, None] + other * added[:, None]
            acc *= normalizer(m, total, p_sinks, head, valid, HAS_SINKS)[:, None]
            o_out = ((begin_query + i_query).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD
            store_rows(p_out + o_out, acc, acc, valid, HEAD, WIDTH, "dense")


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch configuration: keys of a tile, warps, pipeline stages and programs per multiprocessor."""

    keys: int
    num_warps: int
    num_stages: int
    programs: int = 2

    @property
    def options(self) -> dict[str, Any]:
        """Launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}


def tile(dtype: torch.dtype, kv_format: KVFormat, head_dim: int, rows: int, hip: bool = False) -> Tile:
    """Return the launch configuration for a dtype, cell format and number of rows.

    Tiles are small and several programs share a multiprocessor, so that one streams data while another starts or ends
    an item. Every second pipeline stage waits for the block table, the others for keys and values.
    """
    wide = head_dim > 128
    if dtype is torch.float32:
        return Tile(keys=16 if wide else 32, num_warps=4 if rows <= 16 else 8, num_stages=2 if hip else 3, programs=2)
    if hip:
        return Tile(keys=32, num_warps=4, num_stages=2, programs=2)
    if rows <= 16 and kv_format == "dense":
        return Tile(keys=16 if wide else 32, num_warps=4, num_stages=5, programs=4)
    if rows <= 16:
        return Tile(keys=32, num_warps=4, num_stages=7, programs=3)
    if rows <= 64 and kv_format == "int4":
        return Tile(keys=16 if rows == 64 else 32, num_warps=4, num_stages=5, programs=2)
    return Tile(keys=32 if wide else 64, num_warps=8, num_stages=5, programs=1)


def tile_rows(max_queries: int, group: int) -> int:
    """Return the rows of a tile for the query tokens and heads that share a KV head; at least DECODE_ROWS."""
    return max(DECODE_ROWS, 1 << (max_queries * group - 1).bit_length())


def _check(
    query: torch.Tensor, out: torch.Tensor, geometry: AttentionGeometry, work: AttentionWork, scratch: DecodeScratch
) -> None:
    """Raise ValueError for arguments that would cause out-of-bounds accesses or wrong results."""
    shape = (query.shape[0], geometry.num_heads, geometry.head_dim)
    if query.shape != shape or not query.is_contiguous():
        raise ValueError(f"queries must be contiguous with shape {shape}, got {tuple(query.shape)}")
    if out.numel() != query.numel() or not out.is_contiguous():
        raise ValueError(f"the output must be contiguous and as large as the queries, got shape {tuple(out.shape)}")
    if geometry.head_dim % 2 or geometry.num_heads % geometry.num_kv_heads:
        raise ValueError(f"the head size must be even and num_heads a multiple of num_kv_heads, got {geometry}")
    group = geometry.num_heads // geometry.num_kv_heads
    if work.max_decode_queries * group > MAX_ROWS:
        raise ValueError(
            f"{work.max_decode_queries} query tokens of {group} heads exceed the tile limit of {MAX_ROWS} rows"
        )
    if work.window != geometry.window:
        raise ValueError(f"the work list was built for a window of {work.window}, but the layer has {geometry.window}")
    rows = scratch.sums.shape[0]
    if rows < work.scratch_rows or scratch.sums.shape[1:] != query.shape[1:]:
        raise ValueError(
            f"scratch of shape {tuple(scratch.sums.shape)} is too small for {work.scratch_rows} rows of {shape}"
        )


def attention_decode(
    query: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    work: AttentionWork,
    scratch: DecodeScratch,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention for the decoding requests of `work` over keys and values that are already in the pages.

    Args:
        query: [T, num_heads, head_dim], rotated, contiguous.
        pages: Keys and values, including those of this step.
        inputs: Inputs of the step.
        geometry: Shapes and constants.
        work: Work list of build_work for the same inputs and the geometry's window.
        scratch: Memory for partial results.
        out: [T, num_heads * head_dim] of any float dtype, contiguous; rows of other requests are unchanged.
        sinks: [num_heads] float32 (see LayerConstants).

    Raises:
        ValueError: The shapes are inconsistent.
    """
    _check(query, out, geometry, work, scratch)
    if work.max_decode_queries == 0:
        return
    rows = tile_rows(work.max_decode_queries, geometry.num_heads // geometry.num_kv_heads)
    cells = cells_of(pages)
    chosen = tile(query.dtype, pages.format, geometry.head_dim, rows, torch.version.hip is not None)
    variant = _variant(
        geometry, pages.format, cells.strides, rows, chosen, query.dtype, cells.native, sinks is not None
    )
    programs = min(num_processors(query.device) * chosen.programs, work.decode_items.shape[0] * geometry.num_kv_heads)
    variant(
        (programs,),
        out,
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        query,
        *cells.pointers,
        scratch.maxima if sinks is None else sinks,
        inputs.block_table,
        inputs.cu_seqlens_q,
        inputs.seq_lens,
        work.decode_items,
        work.counts,
        inputs.block_table.stride(0),
        float(geometry.scale),
        float(geometry.softcap or 1.0),
        geometry.window or 0,
    )
    if inputs.max_seqlen_k > SPLIT:
        _reduce(inputs, geometry, work, scratch, out, sinks)


@functools.cache
def _variant(
    geometry: AttentionGeometry,
    kv_format: KVFormat,
    strides: CellStrides,
    rows: int,
    chosen: Tile,
    dtype: torch.dtype,
    native: bool,
    has_sinks: bool,
) -> Variant:
    cells = cell_constants(strides, kv_format, native)
    return Variant(attention_decode_kernel, **_options(geometry, product_type(dtype), cells, rows, chosen, has_sinks))


def _options(
    geometry: AttentionGeometry, product: Any, cells: dict[str, Any], rows: int, chosen: Tile, has_sinks: bool
) -> dict[str, Any]:
    return {
        **cells,
        **split_constants(geometry, cells["FORMAT"], product),
        "ROWS": rows,
        "KEYS": chosen.keys,
        "HAS_SINKS": has_sinks,
        **chosen.options,
    }


def _reduce(
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    work: AttentionWork,
    scratch: DecodeScratch,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Merge the partial results; there are none if no request is longer than a split."""
    queries = min(work.max_decode_queries, inputs.max_seqlen_q)
    variant = _reduce_variant(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, sinks is not None)
    variant(
        (inputs.seq_lens.shape[0], queries, geometry.num_kv_heads),
        out,
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        scratch.maxima if sinks is None else sinks,
        inputs.cu_seqlens_q,
        work.partials,
    )


@functools.cache
def _reduce_variant(num_heads: int, num_kv_heads: int, head_dim: int, has_sinks: bool) -> Variant:
    return Variant(attention_reduce_kernel, **_reduce_options(num_heads, num_kv_heads, head_dim, has_sinks))


def _reduce_options(num_heads: int, num_kv_heads: int, head_dim: int, has_sinks: bool) -> dict[str, Any]:
    group = num_heads // num_kv_heads
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_ROWS": int(triton.next_power_of_2(group)),
        "HEAD": head_dim,
        "WIDTH": int(triton.next_power_of_2(head_dim)),
        "HAS_SINKS": has_sinks,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for every head size and format in bfloat16, and for the merge kernel.

    The other dtypes and the features are compiled at Llama's shapes.
    """
    plain = AttentionGeometry(32, 8, 128, 128, 16, 128**-0.5)
    formats: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")
    found = [
        _compilation(target, "bf16", kv_format, AttentionGeometry(32, 8, size, size, 16, size**-0.5), 16)
        for size in (128, 64, 80, 96, 256)
        for kv_format in formats
    ]
    found += [_compilation(target, "bf16", kv_format, plain, rows) for rows in (32, 64) for kv_format in formats]
    found += [_compilation(target, "fp16", kv_format, plain, 16) for kv_format in formats]
    found += [
        _compilation(target, "fp32", "dense", AttentionGeometry(32, 8, size, size, 16, size**-0.5), 16)
        for size in (64, 128, 256)
    ]
    special = AttentionGeometry(64, 8, 64, 64, 16, 0.125, softcap=50.0, window=128)
    found += [_compilation(target, "bf16", kv_format, special, 16, sinks=True) for kv_format in formats]
    return found + [_reduce_compilation(size) for size in (128, 64, 80, 96, 256)]


def _compilation(
    target: Target,
    dtype: Product,
    kv_format: KVFormat,
    geometry: AttentionGeometry,
    rows: int,
    sinks: bool = False,
) -> Compilation:
    types, cells = compiled_cells(target, dtype, kv_format, geometry)
    types |= {"p_query p_out": f"*{dtype}", "p_sums p_maxima p_weights p_sinks": "*fp32", "scale softcap": "fp32"}
    types |= {"p_table p_cu_seqlens p_seq_lens p_items p_counts": "*i32"}
    chosen = tile(TORCH_TYPES[dtype], kv_format, geometry.head_dim, rows, target == "gfx942")
    features = " softcap window sinks" if sinks else ""
    return Compilation(
        "attention_decode",
        f"{dtype} kv={kv_format} d={geometry.head_dim} rows={rows}{features}",
        attention_decode_kernel,
        types,
        _options(geometry, NAMED_TYPES[dtype], cells, rows, chosen, sinks),
        product=dtype,
        rows=rows,
        spills_allowed=64 if dtype == "fp32" else 0,
    )


def _reduce_compilation(head_dim: int) -> Compilation:
    return Compilation(
        "attention_reduce",
        f"bf16 d={head_dim} g=4",
        attention_reduce_kernel,
        {"p_sums p_maxima p_weights p_sinks": "*fp32", "p_out": "*bf16", "p_cu_seqlens p_partials": "*i32"},
        _reduce_options(32, 8, head_dim, False),
    )
