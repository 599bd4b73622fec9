"""The two matrix products of attention over a block of keys stored in pairs, with accumulators in registers.

They are LLVM IR around the instruction of kernels/common/cpu/bf16.py. Every function adds the pairs of a sum in order
for every number of rows, so the result of a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from kernels.common.cpu import bf16
from kernels.common.cpu import numba_internals as llvm
from kernels.common.cpu.simd import (
    I16,
    I32,
    I64,
    VEC,
    WIDTH,
    const,
    emit,
    load,
    operation,
    pointer,
    prefetch,
    splat,
    to_bf16,
)
from kernels.common.cpu.simd import vector as vector_type
from kernels.ops.attention.micro import KEY_BLOCK, ROWS, key_block

MAX_FEW_QUERIES = 8
"""Maximum number of queries of a KV head for which the queries of one token are processed together."""
_REGISTERS = 24
INTS = ir.VectorType(I32, WIDTH)
"""Lanes of a vector as integers."""


def line_keys(page_size: int) -> int:
    """Return the number of scores allocated per row of a block: its keys, rounded up."""
    return (key_block(page_size) + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK


register_jitable(line_keys)


def _splat_pair(builder: Any, address: Any) -> Any:
    """Load the pair at an address into every lane."""
    return builder.bitcast(splat(builder, builder.load(pointer(builder, address, I32), align=4)), bf16.PAIRS)


def _load_pairs(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, bf16.PAIRS), align=4)


def _clamp(builder: Any, value: Any, low: Any, high: Any) -> Any:
    value = builder.select(builder.icmp_signed("<", value, low), low, value)
    return builder.select(builder.icmp_signed(">", value, high), high, value)


class Shape:
    """Literals of an operation."""

    def __init__(self, few: int, num_heads: int, num_kv_heads: int, dim: int, page: int) -> None:
        self.few = few == 1
        self.rows = min(num_heads // num_kv_heads, MAX_FEW_QUERIES) if self.few else ROWS
        self.dim, self.page = dim, page
        self.page_bytes = 2 * self.page * self.dim
        self.step = num_kv_heads * self.page_bytes  # between a head's cells in one page and the next
        self.row_bytes = 4 * line_keys(self.page)

    def page_at(self, builder: Any, base: Any, pages: Any, index: Any) -> Any:
        """Return the address of the cells of the block's page `index`."""
        number = builder.load(pointer(builder, builder.add(pages, builder.mul(index, I64(4))), I32), align=4)
        return builder.add(base, builder.mul(builder.sext(number, I64), I64(self.step)))

    def slot_at(self, builder: Any, base: Any, pages: Any, slot: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the page address of a slot of the block, for pages within bounds, and the slot within that page."""
        index = builder.udiv(slot, I64(self.page))
        within = builder.sub(slot, builder.mul(index, I64(self.page)))
        return self.page_at(builder, base, pages, _clamp(builder, index, *bounds)), within


def _score_columns(rows: int) -> int:
    """Return the number of key vectors that are scored together.

    It is a power of two and large enough to hide the latency of the instruction.
    """
    return next(columns for columns in (8, 4, 2) if rows * columns <= _REGISTERS and (columns < 8 or rows < 3))


def _score_body(builder: Any, shape: Shape, arguments: list[Any]) -> None:
    query, keys, pages, scores, first, end, low, last, final, values = arguments
    columns, halves = _score_columns(shape.rows), 1 if shape.page % WIDTH == 0 else 2
    unit, pair_bytes = WIDTH // halves, 4 * shape.page
    sums = [[llvm.alloca_once(builder, VEC) for _ in range(columns)] for _ in range(shape.rows)]
    start = builder.mul(builder.udiv(first, I64(columns * WIDTH)), I64(columns * WIDTH))
    with llvm.for_range_slice(builder, start, end, I64(columns * WIDTH), I64) as (key, _):
        for slot in (slot for row in sums for slot in row):
            builder.store(const(VEC, 0.0), slot)
        places, fetched = [], []
        for part in range(columns * halves):
            slot = builder.add(key, I64(part * unit))
            page, within = shape.slot_at(builder, keys, pages, slot, (low, last))
            places.append(builder.add(page, builder.mul(within, I64(4))))
            if shape.few and part % halves == 0:
                fetched.append(builder.add(builder.add(page, values), builder.mul(within, I64(2 * shape.dim))))
                after = builder.add(slot, I64(columns * WIDTH))
                page, within = shape.slot_at(builder, keys, pages, after, (low, final))
                fetched.append(builder.add(page, builder.mul(within, I64(4))))
        with llvm.for_range_slice(builder, I64(0), I64(shape.dim // 2), I64(4), I64) as (pair, _):
            for step in range(4):
                index = builder.add(pair, I64(step))
                for number, place in enumerate(fetched):
                    reach = I64(pair_bytes if number % 2 else 64)
                    prefetch(builder, builder.add(place, builder.mul(index, reach)))
                at = builder.mul(index, I64(pair_bytes))
                lines = [_key_vector(builder, places[c * halves :][:halves], at) for c in range(columns)]
                for row, row_sums in enumerate(sums):
                    offset = builder.add(builder.mul(index, I64(4)), I64(row * 2 * shape.dim))
                    factor = _splat_pair(builder, builder.add(query, offset))
                    for line, slot in zip(lines, row_sums):
                        builder.store(bf16.multiply_add(builder, builder.load(slot), line, factor), slot)
        for row, row_sums in enumerate(sums):
            for column, slot in enumerate(row_sums):
                offset = I64(row * shape.row_bytes + column * WIDTH * 4)
                at = builder.add(builder.add(scores, offset), builder.mul(key, I64(4)))
                builder.store(builder.load(slot), pointer(builder, at, VEC), align=4)


def _key_vector(builder: Any, places: list[Any], offset: Any) -> Any:
    """Load one pair of dimensions of 16 slots, which are contiguous or split into two pieces."""
    if len(places) == 1:
        return _load_pairs(builder, builder.add(places[0], offset))
    half = ir.VectorType(I32, WIDTH // 2)
    low, high = (builder.load(pointer(builder, builder.add(at, offset), half), align=4) for at in places)
    lanes = const(INTS, list(range(WIDTH)))
    return builder.bitcast(builder.shuffle_vector(low, high, lanes), bf16.PAIRS)


def _add_body(builder: Any, shape: Shape, arguments: list[Any]) -> None:
    weights, values, pages, out, low, num_keys = arguments
    vectors = shape.dim // WIDTH
    blocks = -(-vectors // max(1, _REGISTERS // shape.rows))
    width = -(-vectors // blocks)
    half = shape.page // 2
    pairs = builder.lshr(num_keys, I64(1))
    end = builder.udiv(builder.add(pairs, I64(half - 1)), I64(half))
    odd = builder.icmp_unsigned("!=", builder.and_(num_keys, I64(1)), I64(0))
    last, within = (
        builder.udiv(pairs, I64(half)),
        builder.urem(pairs, I64(half)),
    )
    for start in range(0, vectors, width):
        columns = range(start, min(start + width, vectors))
        cells = {(r, c): llvm.alloca_once(builder, VEC) for r in range(shape.rows) for c in columns}
        places = {(r, c): builder.add(out, I64((r * shape.dim + c * WIDTH) * 4)) for r, c in cells}
        for cell, slot in cells.items():
            builder.store(load(builder, places[cell], False), slot)

        def add(
            base: Any,
            weight: Any,
            keep: Callable[[Any], Any],
            columns: range = columns,
            cells: dict[tuple[int, int], Any] = cells,
        ) -> None:
            line = {c: keep(_load_pairs(builder, builder.add(base, I64(c * WIDTH * 4)))) for c in columns}
            for row in range(shape.rows):
                factor = _splat_pair(builder, builder.add(weight, I64(row * shape.row_bytes)))
                for c in columns:
                    slot = cells[row, c]
                    builder.store(bf16.multiply_add(builder, builder.load(slot), line[c], factor), slot)

        with llvm.for_range_slice(builder, low, end, I64(1), I64) as (page, _):
            base = shape.page_at(builder, values, pages, page)
            passed = builder.mul(page, I64(half))
            left = builder.sub(pairs, passed)
            count = builder.select(builder.icmp_signed("<", left, I64(half)), left, I64(half))
            with llvm.for_range(builder, count, intp=I64) as loop:
                weight = builder.add(weights, builder.mul(builder.add(passed, loop.index), I64(4)))
                add(builder.add(base, builder.mul(loop.index, I64(4 * shape.dim))), weight, lambda line: line)
        with builder.if_then(odd):
            # The slot after the last key is undefined and may contain NaN, which a weight of zero would not mask.
            base = shape.page_at(builder, values, pages, last)
            base = builder.add(base, builder.mul(within, I64(4 * shape.dim)))
            add(base, builder.add(weights, builder.mul(pairs, I64(4))), lambda line: _lower(builder, line))
        for cell, slot in cells.items():
            builder.store(builder.load(slot), pointer(builder, places[cell], VEC), align=4)


def _lower(builder: Any, line: Any) -> Any:
    """Return pairs whose second element is set to zero."""
    bits = builder.and_(builder.bitcast(line, INTS), const(INTS, 0xFFFF))
    return builder.bitcast(bits, bf16.PAIRS)


def pair_operation(
    name: str, count: int, body: Callable[[Any, Shape, list[Any]], Any], result: Any = types.void
) -> Any:
    """Return an operation with the literals of `Shape`; see kernels.common.cpu.simd.operation."""

    def describe(*literals: int) -> tuple[str, Callable[..., Any]]:
        shape = Shape(*literals)
        return f"{name}_{shape.rows}_{int(shape.few)}", lambda builder, arguments: body(builder, shape, arguments)

    return operation(5, count, describe, result)


score_pairs = pair_operation("score_pairs", 10, _score_body)
"""Compute scores[r, k] = sum over d of query[r, d] * key[k, d] for at least the keys first <= k < end of a block.

Arguments: few, num_heads, num_kv_heads, dim, page, query, keys, pages, scores, first, end, low, last, final, values.
few: 1 for the queries of a KV head, 0 for ROWS queries. query: [rows, dim] bfloat16. keys: address of the head's keys
in page 0, [dim / 2, slot, 2]. pages: address of the block's entry in the block table; keys of pages outside low..last
get the scores of keys within that range. scores: [rows, line_keys(page)] float32. If `few` is 1, the values of these
keys (`values` bytes from the keys) and the keys after them, up to page `final`, are prefetched, because the hardware
prefetcher does not follow a block table.
"""
add_pairs = pair_operation("add_pairs", 6, _add_body)
"""Compute out[r, d] += sum over k < num_keys of weights[r, k] * value[k, d], starting at page `low` of the block.

Arguments: the literals of `score_pairs`, then weights, values, pages, out, low, num_keys. weights: bfloat16, with the
row stride of scores. values: address of the head's values in page 0, [slot / 2, dim, 2]. out: [rows, dim] float32.
"""


@intrinsic(prefer_literal=True)
def scatter_pairs(typing: Any, page: Any, bf16_: Any, address: Any, values: Any) -> Any:
    """Round 16 dimensions of a key to bfloat16 and store them in its slot of a page, with the arguments of vscatter."""
    stride = 4 * page.literal_value

    def body(builder: Any, _page: Any, _bf16: Any, target: Any, lanes: Any) -> None:
        words = builder.bitcast(bf16.round_pairs(builder, lanes, lanes), INTS)
        for pair in range(WIDTH // 2):
            place = pointer(builder, builder.add(target, I64(pair * stride)), I32)
            builder.store(builder.extract_element(words, I32(pair)), place, align=4)

    return emit(types.void, (page, bf16_, types.int64, vector_type), body)


@intrinsic
def store_half(typing: Any, address: Any, values: Any, second: Any) -> Any:
    """Store 16 dimensions of a value as first or second elements of their pairs; the others are unchanged."""

    def body(builder: Any, target: Any, lanes: Any, parity: Any) -> None:
        words = builder.zext(to_bf16(builder, lanes), INTS)
        shorts = ir.VectorType(I16, 2 * WIDTH)
        both = builder.bitcast(builder.or_(words, builder.shl(words, const(INTS, 16))), shorts)
        parities = ir.Constant(shorts, [I16(i % 2) for i in range(2 * WIDTH)])
        chosen = builder.icmp_unsigned("==", parities, splat(builder, builder.trunc(parity, I16), 2 * WIDTH))
        anything = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [shorts, anything, I32, chosen.type])
        # One masked store, because another thread may be writing the other half of the pair.
        write = llvm.get_or_insert_function(builder.module, kind, "llvm.masked.store.v32i16.p0")
        builder.call(write, [both, builder.inttoptr(target, anything), I32(2), chosen])

    return emit(types.void, (types.int64, vector_type, types.int64), body)


@intrinsic
def store_rounded(typing: Any, address: Any, values: Any) -> Any:
    """Store 16 adjacent values as bfloat16."""

    def body(builder: Any, target: Any, lanes: Any) -> None:
        words = builder.bitcast(bf16.round_pairs(builder, lanes, lanes), INTS)
        half = const(ir.VectorType(I32, WIDTH // 2), list(range(WIDTH // 2)))
        words = builder.shuffle_vector(words, ir.Constant(INTS, ir.Undefined), half)
        builder.store(words, pointer(builder, target, words.type), align=2)

    return emit(types.void, (types.int64, vector_type), body)
