"""Prefill attention over paged keys and values: each program computes one tile of queries of one KV head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import LOG2_E, rounded, tanh
from kernels.common.triton.compilations import Compilation, Product, Target
from kernels.common.triton.formats import decode_cells, decode_int4_high, decode_int4_low
from kernels.common.triton.launch import FLOAT_NAMES, NAMED_TYPES, TRITON_TYPES, Variant, nearest_target, product_type
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import KVFormat, KVPages
from kernels.ops.attention.triton_cells import CellStrides, cell_constants, cells_of, compiled_cells, weight_type
from kernels.ops.attention_work.inputs import AttentionWork


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch configuration: rows of queries, keys per tile, warps and pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile(target: Target, head_dim: int, kv_format: KVFormat, *, wide: bool) -> Tile:
    """Return the launch configuration. `wide`: products are float32, computed with ordinary multiply-adds.

    It does not depend on the step, because the result of a query must not depend on the rest of its batch.
    """
    large, dense = head_dim > 128, kv_format == "dense"
    if wide:
        return Tile(16 if large else 32, 32, 4 if target == "gfx942" else 8, 1)
    if target == "gfx942":
        return Tile(64, 32, 4, 1) if large else Tile(128, 64 if dense else 32, 4, 1)
    if target == "sm_80":
        if large:
            return Tile(64, 32, 8, 2)
        if dense:
            return Tile(128, 32, 8, 3)
        return Tile(64, 64, 8, 2) if head_dim > 96 and kv_format != "int4" else Tile(64, 32, 4, 2)
    return Tile(128, 32 if large else 64, 8, 2 if large and dense else 3)


@triton.jit
def load_part(p_cells, o_cell, key_mask, BEGIN: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              STRIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load dimensions BEGIN .. BEGIN + WIDTH of the cells at o_cell as [KEYS, PADDED].

    Padding dimensions and masked keys are zero.
    """
    o_dim = tl.arange(0, PADDED)
    pointers = p_cells + o_cell[:, None] + ((BEGIN + o_dim) * STRIDE)[None, :]
    if WIDTH < PADDED:
        mask = (o_dim < WIDTH)[None, :]
        if MASKED:
            mask = mask & key_mask[:, None]
        cells = tl.load(pointers, mask=mask, other=0.0)
    elif MASKED:
        cells = tl.load(pointers, mask=key_mask[:, None], other=0.0)
    else:
        cells = tl.load(pointers)
    return cells


@triton.jit
def load_cells(p_cells, o_cell, key_mask, STRIDE: tl.constexpr, FIRST: tl.constexpr, FIRST_PADDED: tl.constexpr,
               SECOND: tl.constexpr, SECOND_PADDED: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
               TYPE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load the two parts of cells as TYPE. Without a second part (SECOND 0), return the first part twice."""
    codes = load_part(p_cells, o_cell, key_mask, 0, FIRST, FIRST_PADDED, STRIDE, MASKED)
    if FORMAT == "int4":
        first, second = decode_int4_low(codes, TYPE), decode_int4_high(codes, TYPE)
    else:
        first = decode_cells(codes, FORMAT, NATIVE, TYPE)
        second = first
        if SECOND > 0:
            codes = load_part(p_cells, o_cell, key_mask, FIRST, SECOND, SECOND_PADDED, STRIDE, MASKED)
            second = decode_cells(codes, FORMAT, NATIVE, TYPE)
    return first, second


@triton.jit
def attend_tile(
    key, end, o_position, first_query, second_query, maximum, total, first_sum, second_sum,
    p_table, p_keys, p_values, p_key_scales, p_value_scales, factor, softcap,
    KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr,
    FIRST: tl.constexpr, FIRST_PADDED: tl.constexpr, SECOND: tl.constexpr, SECOND_PADDED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, PRODUCT: tl.constexpr, WEIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process keys key .. key + KEYS and return the new maximum, total and sums.

    If not MASKED, every row sees all of these keys.
    """
    o_key = key + tl.arange(0, KEYS)
    key_mask = o_key < end
    if PAGE_SIZE % KEYS == 0:
        page = tl.load(p_table + key // PAGE_SIZE).to(tl.int64)
        o_slot = (key % PAGE_SIZE + tl.arange(0, KEYS)).to(tl.int64)
    else:
        if MASKED:
            page = tl.load(p_table + o_key // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
        else:
            page = tl.load(p_table + o_key // PAGE_SIZE).to(tl.int64)
        o_slot = (o_key % PAGE_SIZE).to(tl.int64)
    o_cell = page * KEY_STRIDES[0] + o_slot * KEY_STRIDES[2]
    first, second = load_cells(p_keys, o_cell, key_mask, KEY_STRIDES[3], FIRST, FIRST_PADDED, SECOND, SECOND_PADDED,
                               FORMAT, NATIVE, PRODUCT, MASKED)  # fmt: skip
    scores = tl.dot(first_query, tl.trans(first), input_precision="ieee", out_dtype=tl.float32)
    if SECOND > 0:
        scores = tl.dot(second_query, tl.trans(second), scores, input_precision="ieee", out_dtype=tl.float32)
    if FORMAT != "dense":
        o_scale = page * SCALE_STRIDES[0] + o_slot * SCALE_STRIDES[2]
        if MASKED:
            key_scale = tl.load(p_key_scales + o_scale, mask=key_mask, other=0.0)
            value_scale = tl.load(p_value_scales + o_scale, mask=key_mask, other=0.0)
        else:
            key_scale, value_scale = tl.load(p_key_scales + o_scale), tl.load(p_value_scales + o_scale)
        scores = scores * key_scale[None, :]
    if HAS_SOFTCAP:
        scores = tanh(scores * (factor / (softcap * LOG2_E))) * (softcap * LOG2_E)
        factor = 1.0
    if MASKED:
        visible = o_key[None, :] <= o_position[:, None]
        if WINDOW > 0:
            visible = visible & (o_key[None, :] > o_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
    # A row that has seen no keys yet keeps a maximum of -inf, for which 0 is subtracted.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    # One rounding in both the masked and the unmasked loop. No other operations may be fused (enable_fp_fusion is off).
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.zeros_like(scores) - shift[:, None]))
    kept = tl.exp2(maximum - shift)
    total = total * kept + tl.sum(weights, axis=1)
    if FORMAT != "dense":
        weights = weights * value_scale[None, :]
    weights = weights.to(WEIGHT)
    o_cell = page * VALUE_STRIDES[0] + o_slot * VALUE_STRIDES[2]
    first, second = load_cells(p_values, o_cell, key_mask, VALUE_STRIDES[3], FIRST, FIRST_PADDED, SECOND, SECOND_PADDED,
                               FORMAT, NATIVE, WEIGHT, MASKED)  # fmt: skip
    first_sum = tl.dot(weights, first, first_sum * kept[:, None], input_precision="ieee", out_dtype=tl.float32)
    if SECOND > 0:
        second_sum = tl.dot(weights, second, second_sum * kept[:, None], input_precision="ieee", out_dtype=tl.float32)
    return new_maximum, total, first_sum, second_sum


@triton.jit
def attention_prefill_kernel(
    p_queries, p_keys, p_values, p_key_scales, p_value_scales, p_sinks, p_out,
    p_tiles, p_counts, p_bounds, p_lengths, p_tables, stride_table, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr,
    FIRST: tl.constexpr, FIRST_PADDED: tl.constexpr, SECOND: tl.constexpr, SECOND_PADDED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, PRODUCT: tl.constexpr, WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `attention_prefill`. A row is one of QUERIES query tokens and one head of the group.

    Key tiles begin at multiples of KEYS and are processed in ascending order. The result of a query is therefore the
    same for any chunk size and any other queries in the batch.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1)
    if i_tile >= tl.load(p_counts + 1):
        return
    request = tl.load(p_tiles + 2 * i_tile)
    start = tl.load(p_tiles + 2 * i_tile + 1)
    bound = tl.load(p_bounds + request)
    num_queries = tl.load(p_bounds + request + 1) - bound
    position = tl.load(p_lengths + request) - num_queries + start
    num_queries = tl.minimum(num_queries - start, QUERIES)
    end = position + num_queries

    o_row = tl.arange(0, ROWS)
    o_query = o_row // GROUP
    o_head = i_head * GROUP + o_row % GROUP
    row_mask = o_query < num_queries
    o_token = (bound + start + o_query).to(tl.int64)
    o_first = tl.arange(0, FIRST_PADDED)
    o_second = tl.arange(0, SECOND_PADDED)
    o_value = o_token * (HEADS * DIM) + o_head * DIM
    first_mask = row_mask[:, None] & (o_first < FIRST)[None, :]
    second_mask = row_mask[:, None] & (o_second < SECOND)[None, :]
    p_query = p_queries + o_value[:, None]
    first_query = tl.load(p_query + o_first[None, :], mask=first_mask, other=0.0).to(PRODUCT)
    second_query = first_query
    if SECOND > 0:
        second_query = tl.load(p_query + (FIRST + o_second)[None, :], mask=second_mask, other=0.0).to(PRODUCT)
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_SINKS:
        maximum = tl.load(p_sinks + o_head, mask=row_mask, other=0.0) * LOG2_E
        total = total + 1.0
    first_sum = tl.zeros([ROWS, FIRST_PADDED], dtype=tl.float32)
    second_sum = tl.zeros([ROWS, SECOND_PADDED], dtype=tl.float32)

    i_cell = i_head.to(tl.int64)
    p_table = p_tables + request.to(tl.int64) * stride_table
    p_keys += i_cell * KEY_STRIDES[1]
    p_values += i_cell * VALUE_STRIDES[1]
    p_key_scales += i_cell * SCALE_STRIDES[1]
    p_value_scales += i_cell * SCALE_STRIDES[1]
    o_position = position + o_query
    factor = scale * LOG2_E
    clear = 0  # the first key tile that no row's window cuts
    if WINDOW > 0:
        clear = (tl.maximum(end - WINDOW, 0) + KEYS - 1) // KEYS * KEYS
        for key in tl.range(tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS, tl.minimum(clear, end), KEYS,
                            num_stages=1):  # fmt: skip
            maximum, total, first_sum, second_sum = attend_tile(
                key, end, o_position, first_query, second_query, maximum, total, first_sum, second_sum,
                p_table, p_keys, p_values, p_key_scales, p_value_scales, factor, softcap,
                KEYS, PAGE_SIZE, WINDOW, HAS_SOFTCAP, KEY_STRIDES, VALUE_STRIDES, SCALE_STRIDES,
                FIRST, FIRST_PADDED, SECOND, SECOND_PADDED, FORMAT, NATIVE, PRODUCT, WEIGHT, True,
            )  # fmt: skip
    full = (position + 1) // KEYS * KEYS
    for key in range(clear, full, KEYS):
        maximum, total, first_sum, second_sum = attend_tile(
            key, end, o_position, first_query, second_query, maximum, total, first_sum, second_sum,
            p_table, p_keys, p_values, p_key_scales, p_value_scales, factor, softcap,
            KEYS, PAGE_SIZE, WINDOW, HAS_SOFTCAP, KEY_STRIDES, VALUE_STRIDES, SCALE_STRIDES,
            FIRST, FIRST_PADDED, SECOND, SECOND_PADDED, FORMAT, NATIVE, PRODUCT, WEIGHT, False,
        )  # fmt: skip
    for key in tl.range(tl.maximum(clear, full), end, KEYS, num_stages=1):
        maximum, total, first_sum, second_sum = attend_tile(
            key, end, o_position, first_query, second_query, maximum, total, first_sum, second_sum,
            p_table, p_keys, p_values, p_key_scales, p_value_scales, factor, softcap,
            KEYS, PAGE_SIZE, WINDOW, HAS_SOFTCAP, KEY_STRIDES, VALUE_STRIDES, SCALE_STRIDES,
            FIRST, FIRST_PADDED, SECOND, SECOND_PADDED, FORMAT, NATIVE, PRODUCT, WEIGHT, True,
        )  # fmt: skip

    share = 1.0 / total
    p_row = p_out + o_value[:, None]
    tl.store(p_row + o_first[None, :], rounded(first_sum * share[:, None], p_out.dtype.element_ty), mask=first_mask)
    if SECOND > 0:
        second = rounded(second_sum * share[:, None], p_out.dtype.element_ty)
        tl.store(p_row + (FIRST + o_second)[None, :], second, mask=second_mask)


def prefill_tile(geometry: AttentionGeometry, pages: KVPages, dtype: torch.dtype, device: torch.device) -> int:
    """Return the query tokens of one tile, by which the work list must be divided (AttentionWork.prefill_tile).

    Raises:
        ValueError: More heads share a KV head than a tile has rows.
    """
    return _queries_of(_tile_of(geometry, pages, dtype, device), geometry)


def _tile_of(geometry: AttentionGeometry, pages: KVPages, dtype: torch.dtype, device: torch.device) -> Tile:
    wide = torch.float32 in (dtype, pages.keys.dtype)
    return tile(nearest_target(device), geometry.head_dim, pages.format, wide=wide)


def _queries_of(chosen: Tile, geometry: AttentionGeometry) -> int:
    group = geometry.num_heads // geometry.num_kv_heads
    if group > chosen.rows:
        raise ValueError(f"{group} heads share a KV head, but prefill attention supports at most {chosen.rows}")
    return chosen.rows // group


def attention_prefill(
    queries: torch.Tensor,
    pages: KVPages,
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    sinks: torch.Tensor | None,
    work: AttentionWork,
    out: torch.Tensor,
) -> None:
    """Compute `attend` of kernels/ops/attention/reference.py for the tiles of the work list.

    Args:
        queries: [T, num_heads, head_dim], rotated, contiguous.
        pages: Keys and values, including those of this step.
        inputs: Inputs of the step.
        geometry: Shapes and constants.
        sinks: [num_heads] float32, or None.
        work: Work list with tiles of the size that `prefill_tile` returns.
        out: [T, num_heads * head_dim], contiguous; rows of requests that are not in the list are unchanged.

    Raises:
        ValueError: A tensor is not contiguous, or the work list has tiles of another size.
    """
    num_tokens, num_requests = queries.shape[0], inputs.seq_lens.shape[0]
    num_tiles = work.max_prefill_tiles(num_tokens, num_requests)
    if not num_tiles:
        return
    device = queries.device
    chosen = _tile_of(geometry, pages, queries.dtype, device)
    if work.prefill_tile != _queries_of(chosen, geometry):
        raise ValueError(
            f"the work list has tiles of {work.prefill_tile} queries, which is not the kernel's tile size; use "
            "prefill_tile()"
        )
    if not (queries.is_contiguous() and out.is_contiguous() and inputs.block_table.stride(1) == 1):
        raise ValueError("queries, output and the rows of the block table must be contiguous")
    cells = cells_of(pages)
    wide = torch.float32 in (queries.dtype, pages.keys.dtype)
    product = TRITON_TYPES[torch.float32] if wide else product_type(queries.dtype)
    variant = _variant(geometry, cells.strides, pages.format, chosen, sinks is not None, cells.native, product)
    variant(
        (num_tiles, geometry.num_kv_heads),
        queries, *cells.pointers, sinks if sinks is not None else queries,
        out, work.prefill_tiles, work.counts, inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_table,
        inputs.block_table.stride(0), float(geometry.scale), float(geometry.softcap or 0.0),
    )  # fmt: skip


@functools.cache
def _variant(
    geometry: AttentionGeometry,
    strides: CellStrides,
    kv_format: KVFormat,
    chosen: Tile,
    has_sinks: bool,
    native: bool,
    product: Any,
) -> Variant:
    cells = cell_constants(strides, kv_format, native)
    return Variant(attention_prefill_kernel, **_options(geometry, chosen, product, has_sinks, cells))


def _parts(head_dim: int, kv_format: KVFormat) -> tuple[int, int, int, int]:
    """Return FIRST, FIRST_PADDED, SECOND, SECOND_PADDED: a head in one or two parts, each padded to a power of two.

    A head of 80 is divided into 64 and 16 instead of being padded to 128. The parts of int4 are the dimensions in the
    low and high halves of its bytes.
    """
    first = head_dim // 2 if kv_format == "int4" else 1 << head_dim.bit_length() - 1
    second = head_dim - first
    padded = [max(16, triton.next_power_of_2(width)) for width in (first, second)]
    return first, padded[0], second, padded[1]


def _options(
    geometry: AttentionGeometry, chosen: Tile, product: Any, has_sinks: bool, cells: dict[str, Any]
) -> dict[str, Any]:
    kv_format = cells["FORMAT"]
    parts = dict(zip(("FIRST", "FIRST_PADDED", "SECOND", "SECOND_PADDED"), _parts(geometry.head_dim, kv_format)))
    return {
        **cells,
        **parts,
        "HEADS": geometry.num_heads,
        "KV_HEADS": geometry.num_kv_heads,
        "DIM": geometry.head_dim,
        "PAGE_SIZE": geometry.page_size,
        "WINDOW": geometry.window or 0,
        "HAS_SOFTCAP": geometry.softcap is not None,
        "HAS_SINKS": has_sinks,
        "PRODUCT": product,
        "WEIGHT": weight_type(product, kv_format),
        "ROWS": chosen.rows,
        "QUERIES": _queries_of(chosen, geometry),
        "KEYS": chosen.keys,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "enable_fp_fusion": False,
    }


_FORMATS: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for Llama 3.1 8B in every dtype and format, for other head sizes and for features."""
    llama = AttentionGeometry(32, 8, 128, 128, 16, 128**-0.5)
    found = [_compilation(target, dtype, kv, llama) for dtype in FLOAT_NAMES.values() for kv in _FORMATS]
    for dim in (64, 80, 96, 256):
        geometry = AttentionGeometry(32, 8, dim, dim, 16, dim**-0.5)
        found += [_compilation(target, "bf16", kv, geometry) for kv in _FORMATS]
        found.append(_compilation(target, "fp32", "dense", geometry))
    windowed = AttentionGeometry(32, 8, 128, 128, 16, 128**-0.5, None, 1024)
    capped = AttentionGeometry(8, 4, 256, 256, 16, 0.0625, 50.0, 4096)
    wide_pages = AttentionGeometry(28, 4, 128, 128, 64, 128**-0.5)
    found += [_compilation(target, "bf16", kv, windowed) for kv in _FORMATS]
    found += [_compilation(target, "bf16", "dense", geometry) for geometry in (capped, wide_pages)]
    sinking = AttentionGeometry(64, 8, 64, 64, 16, 0.125, None, 128)
    return [*found, _compilation(target, "bf16", "dense", sinking, has_sinks=True)]


def _compilation(
    target: Target, dtype: Product, kv: KVFormat, geometry: AttentionGeometry, *, has_sinks: bool = False
) -> Compilation:
    dim = geometry.head_dim
    chosen = tile(target, dim, kv, wide=dtype == "fp32")
    types, cells = compiled_cells(target, dtype, kv, geometry)
    types |= {"p_queries p_out": f"*{dtype}", "p_sinks": "*fp32" if has_sinks else f"*{dtype}"}
    types |= {"p_tiles p_counts p_bounds p_lengths p_tables": "*i32", "scale softcap": "fp32"}
    features = [f"window={geometry.window}"] * bool(geometry.window) + ["softcap"] * bool(geometry.softcap)
    features += ["sinks"] * has_sinks
    shape = f"{dtype} kv={kv} d={dim} g={geometry.num_heads // geometry.num_kv_heads} page={geometry.page_size}"
    return Compilation(
        "attention_prefill",
        " ".join([shape, *features]),
        attention_prefill_kernel,
        types,
        _options(geometry, chosen, NAMED_TYPES[dtype], has_sinks, cells),
        product=dtype,
        rows=chosen.rows,
        spills_allowed=16 if target == "sm_80" and dim == 96 and (kv == "fp8" or dtype == "fp32") else 0,
    )
