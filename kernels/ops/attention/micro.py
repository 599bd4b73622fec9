"""The two matrix products of attention over one page, with accumulators in registers.

They are written in LLVM IR because numba cannot keep a block of accumulators in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from kernels.common.cpu import numba_internals as llvm
from kernels.common.cpu.simd import F32, I64, WIDTH, const, emit, fma, load, pointer, prefetch, splat, store

ROWS = 6
"""Number of queries whose products are accumulated in registers together."""
KEY_BLOCK = 128
"""Number of keys that a tile scores at a time, unless pages are larger."""
_VECTORS = 4
"""Vectors of dimensions whose sums `add_page` accumulates together."""


def _accumulators(builder: Any, count: int, kind: Any) -> list[Any]:
    """Return stack slots that LLVM promotes to registers."""
    return [llvm.alloca_once(builder, kind) for _ in range(count)]


def slot_width(page_size: int) -> int:
    """Return the number of slots of a page that are scored together."""
    return WIDTH if page_size % WIDTH == 0 else 8


def key_block(page_size: int) -> int:
    """Return the number of keys that a tile scores at a time, a multiple of the page size."""
    return page_size * max(1, KEY_BLOCK // page_size)


def line_values(page_size: int) -> int:
    """Return the number of values between rows of scores: the keys of a block, rounded up to whole vectors."""
    return -(-key_block(page_size) // WIDTH) * WIDTH


for _size in (key_block, line_values):
    register_jitable(_size)


def _rows(few: Any, num_heads: Any, num_kv_heads: Any) -> int:
    return min(num_heads.literal_value // num_kv_heads.literal_value, ROWS) if few.literal_value == 1 else ROWS


@intrinsic(prefer_literal=True)
def score_page(
    typing: Any,
    few: Any,
    num_heads: Any,
    num_kv_heads: Any,
    dim: Any,
    page: Any,
    bf16: Any,
    query: Any,
    keys: Any,
    scores: Any,
    next_keys: Any,
    next_values: Any,
) -> Any:
    """Compute scores[r, s] = sum over d of query[r, d] * keys[d, s] for all slots of a page.

    Literals: few (1: the queries of a KV head, 0: ROWS queries), num_heads, num_kv_heads, dim, page, bf16 (of the
    keys). query: [rows, dim] float32; keys: [dim, page]; scores: [rows, line_values(page)] float32. Even and odd d are
    summed separately, which hides the latency when there are few rows. If `few` is 1, the pages next_keys and
    next_values are prefetched, because the hardware prefetcher does not follow a block table.
    """
    num_rows, head_dim, slots = _rows(few, num_heads, num_kv_heads), dim.literal_value, page.literal_value
    narrow, step = bool(bf16.literal_value), line_values(slots)
    width = slot_width(slots)
    kind = ir.VectorType(F32, width)
    size = 2 if narrow else 4
    prefetched = few.literal_value == 1

    def body(builder: Any, *values: Any) -> None:
        query_address, key_address, score_address = values[6:9]
        sums = _accumulators(builder, 2 * num_rows, kind)
        for first in range(0, slots, width):
            for slot in sums:
                builder.store(const(kind, 0.0), slot)
            with llvm.for_range_slice(builder, I64(0), I64(head_dim), I64(2), I64) as (d, _):
                if prefetched and first == 0:
                    reach = builder.mul(d, I64(slots * size))
                    for base in values[9:]:
                        for line in range(0, 2 * slots * size, 64):
                            prefetch(builder, builder.add(base, builder.add(reach, I64(line))))
                for parity in range(2):
                    index = builder.add(d, I64(parity))
                    offset = builder.add(builder.mul(index, I64(slots * size)), I64(first * size))
                    key = load(builder, builder.add(key_address, offset), narrow, width)
                    row_address = builder.add(query_address, builder.mul(index, I64(4)))
                    for row in range(num_rows):
                        at = pointer(builder, builder.add(row_address, I64(row * head_dim * 4)), F32)
                        factor = splat(builder, builder.load(at), width)
                        slot = sums[2 * row + parity]
                        builder.store(fma(builder, key, factor, builder.load(slot)), slot)
            for row in range(num_rows):
                total = builder.fadd(builder.load(sums[2 * row]), builder.load(sums[2 * row + 1]))
                store(builder, builder.add(score_address, I64((row * step + first) * 4)), total, False)

    return emit(types.void, (few, num_heads, num_kv_heads, dim, page, bf16, *[types.int64] * 5), body)


@intrinsic(prefer_literal=True)
def add_page(
    typing: Any,
    few: Any,
    num_heads: Any,
    num_kv_heads: Any,
    dim: Any,
    page: Any,
    bf16: Any,
    weights: Any,
    values: Any,
    out: Any,
    count: Any,
) -> Any:
    """Compute out[r, d] += sum over s < count of weights[r, s] * values[s, d].

    Literals: see `score_page`. weights: with the row stride of scores; values: [slots, dim]; out: [rows, dim] float32.
    """
    num_rows, head_dim = _rows(few, num_heads, num_kv_heads), dim.literal_value
    narrow, step = bool(bf16.literal_value), line_values(page.literal_value)
    kind = ir.VectorType(F32, WIDTH)
    size = 2 if narrow else 4

    def body(builder: Any, *arguments: Any) -> None:
        weight_address, value_address, out_address, slots = arguments[6:]
        vectors = head_dim // WIDTH
        for start in range(0, vectors, _VECTORS):
            columns = range(start, min(start + _VECTORS, vectors))
            cells = {(r, c): llvm.alloca_once(builder, kind) for r in range(num_rows) for c in columns}
            places = {(r, c): builder.add(out_address, I64((r * head_dim + c * WIDTH) * 4)) for r, c in cells}
            for cell, slot in cells.items():
                builder.store(load(builder, places[cell], False), slot)
            with llvm.for_range(builder, slots, intp=I64) as loop:
                base = builder.add(value_address, builder.mul(loop.index, I64(head_dim * size)))
                line = {c: load(builder, builder.add(base, I64(c * WIDTH * size)), narrow) for c in columns}
                weight_at = builder.add(weight_address, builder.mul(loop.index, I64(4)))
                for row in range(num_rows):
                    at = pointer(builder, builder.add(weight_at, I64(row * step * 4)), F32)
                    factor = splat(builder, builder.load(at))
                    for c in columns:
                        slot = cells[row, c]
                        builder.store(fma(builder, line[c], factor, builder.load(slot)), slot)
            for cell, slot in cells.items():
                store(builder, places[cell], builder.load(slot), False)

    return emit(types.void, (few, num_heads, num_kv_heads, dim, page, bf16, *[types.int64] * 4), body)
