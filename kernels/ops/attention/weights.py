"""Softmax weights of the rows of a block of scores, as powers of two, with sums and shifts in registers.

The weight of a score s is 2^(s - shift) with a shift per row. The shift need not be the highest score. It is raised
only if a score exceeds it by more than SLACK, which is rare after the first block of a row, so the processor need not
wait for a maximum before it computes powers. Weights are at most 2^SLACK, which costs no precision. The result of a
row does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.common.cpu import bf16
from kernels.common.cpu import numba_internals as llvm
from kernels.common.cpu.simd import F32, I16, I32, I64, VEC, WIDTH, call, const, emit, fma, fold, load, pointer, splat
from kernels.common.cpu.simd import vector as vector_type
from kernels.ops.attention.micro_pairs import INTS, Shape, pair_operation
from kernels.ops.attention.rows import HIDDEN

SLACK = 8.0
"""Maximum excess of scores above the shift."""
# 2^r = 1 + r c1 + r^2 c2 + ... for |r| <= 1/2 with minimal relative error: 3e-6, and 1e-4 for weights, whose rounding
# to bfloat16 has an error of up to 2e-3.
_POWER = (0.69312418, 0.24024099, 0.055906426, 0.009582853)
_ROUGH_POWER = (0.69328297, 0.24221113, 0.05500874)


def _higher(builder: Any, x: Any, y: Any) -> Any:
    """Return the larger value of each lane; y if either is NaN."""
    return builder.select(builder.fcmp_ordered("ogt", x, y), x, y)


def _exp2(builder: Any, x: Any, power: tuple[float, ...]) -> Any:
    """Return 2^x of each lane."""
    whole = call(builder, "nearbyint", VEC, x)
    rest = builder.fsub(x, whole)
    series = const(VEC, power[-1])
    for factor in (*power[-2::-1], 1.0):
        series = fma(builder, series, rest, const(VEC, factor))
    kind = ir.FunctionType(VEC, [VEC, VEC, VEC, I16, I32])
    scale = llvm.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    return builder.call(scale, [series, whole, const(VEC, 0.0), I16(-1), I32(4)])


@intrinsic
def vexp2(typing: Any, x: Any) -> Any:
    """Return 2^x of each finite lane with a relative error of at most 2^-17; infinity for x >= 128."""
    return emit(vector_type, (vector_type,), lambda builder, value: _exp2(builder, value, _POWER))


def _pair_of_lines(builder: Any, shape: Shape, address: Any, row: int) -> list[Any]:
    """Load 32 scores of a row of the block."""
    offsets = (row * shape.row_bytes + half * 4 * WIDTH for half in range(2))
    return [load(builder, builder.add(address, I64(offset)), False) for offset in offsets]


def _shift_of(builder: Any, shifts: Any, row: int) -> Any:
    return builder.load(pointer(builder, builder.add(shifts, I64(4 * row)), F32))


def _tops_body(builder: Any, shape: Shape, arguments: list[Any]) -> Any:
    lines, first, end, shifts = arguments
    tops = [llvm.alloca_once(builder, VEC) for _ in range(shape.rows)]
    for slot in tops:
        builder.store(const(VEC, HIDDEN), slot)
    with llvm.for_range_slice(builder, first, end, I64(2 * WIDTH), I64) as (key, _):
        address = builder.add(lines, builder.mul(key, I64(4)))
        for row, slot in enumerate(tops):
            top = _higher(builder, *_pair_of_lines(builder, shape, address, row))
            builder.store(_higher(builder, top, builder.load(slot)), slot)
    found = I64(0)
    for row, slot in enumerate(tops):
        limit = builder.fadd(_shift_of(builder, shifts, row), ir.Constant(F32, SLACK))
        lanes = builder.bitcast(builder.fcmp_ordered("ogt", builder.load(slot), splat(builder, limit)), I16)
        bit = builder.select(builder.icmp_unsigned("!=", lanes, I16(0)), I64(1 << row), I64(0))
        found = builder.or_(found, bit)
    return found


def _weigh_body(builder: Any, shape: Shape, arguments: list[Any]) -> None:
    lines, first, end, shifts, totals = arguments
    places = [builder.add(totals, I64(4 * WIDTH * row)) for row in range(shape.rows)]
    sums = [llvm.alloca_once(builder, VEC) for _ in places]
    shift_by = []
    for row, slot in enumerate(sums):
        builder.store(load(builder, places[row], False), slot)
        # Before the first visible key, the shift is still the score of masked keys.
        shift = _higher(builder, _shift_of(builder, shifts, row), ir.Constant(F32, HIDDEN / 3))
        shift_by.append(splat(builder, shift))
    ones = builder.bitcast(const(INTS, 0x3F803F80), bf16.PAIRS)
    with llvm.for_range_slice(builder, first, end, I64(2 * WIDTH), I64) as (key, _):
        source = builder.add(lines, builder.mul(key, I64(4)))
        target = builder.add(lines, builder.mul(key, I64(2)))
        for row, slot in enumerate(sums):
            scores = _pair_of_lines(builder, shape, source, row)
            powers = [_exp2(builder, builder.fsub(x, shift_by[row]), _ROUGH_POWER) for x in scores]
            rounded = bf16.round_pairs(builder, *powers)
            place = builder.add(target, I64(row * shape.row_bytes))
            builder.store(rounded, pointer(builder, place, bf16.PAIRS), align=4)
            builder.store(bf16.multiply_add(builder, builder.load(slot), rounded, ones), slot)
    for place, slot in zip(places, sums):
        builder.store(builder.load(slot), pointer(builder, place, VEC), align=4)


rows_above = pair_operation("rows_above", 4, _tops_body, types.int64)
"""Return an int64 bit mask of the rows that have a score more than SLACK above their shift.

Bit r is set if a score first <= k < end of row r exceeds the shift of row r by more than SLACK. Arguments: the literals
of `score_pairs`, then lines, first, end, shifts. first and end are multiples of 32. shifts: [rows] float32.
"""
weigh_rows = pair_operation("weigh_rows", 5, _weigh_body)
"""Convert the scores first <= k < end of each row to weights 2^(score - shift), rounded to bfloat16.

Arguments: the literals of `score_pairs`, then lines, first, end, shifts, totals. first and end are multiples of 32.
Weights replace scores, so that the weight of key k is at line + 2 k. totals: [rows, 16] float32, to which the rounded
weights are added.
"""


@intrinsic
def highest_score(typing: Any, line: Any, first: Any, end: Any) -> Any:
    """Return the highest of the scores first <= k < end of a line; first and end are multiples of 16."""

    def body(builder: Any, line_at: Any, low: Any, high: Any) -> Any:
        top = llvm.alloca_once_value(builder, const(VEC, HIDDEN))
        with llvm.for_range_slice(builder, low, high, I64(WIDTH), I64) as (key, _):
            scores = load(builder, builder.add(line_at, builder.mul(key, I64(4))), False)
            builder.store(_higher(builder, scores, builder.load(top)), top)
        return fold(builder, builder.load(top), lambda x, y: _higher(builder, x, y))

    return emit(types.float32, (types.int64, types.int64, types.int64), body)
