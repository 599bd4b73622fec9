"""Inner products of a panel of 16 output features with rows of activations, as LLVM IR around AVX512-BF16.

A lane is an output feature, so no sum crosses lanes. `dot` multiplies integer codes, which bfloat16 represents
exactly, and scales the sum of each block: it unpacks 32 weights in two instructions and spends three on each row and
block. `dot_values` multiplies weights that `unpack` has computed of two panels, which pays with enough rows.
"""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from kernels.common.cpu import numba_internals as llvm
from kernels.common.cpu.bf16 import PAIRS, multiply_add, round_pairs
from kernels.common.cpu.simd import F32, I16, I32, I64, VEC, WIDTH, const, fma, operation, pointer, prefetch, splat

BLOCK = 32
"""Inputs that share a scale and a minimum."""
DOT_ROWS = 16
"""Maximum number of rows of one call of `dot`."""
VALUE_ROWS = 12
"""Rows of one call of `dot_values`: with two panels 24 sums, the registers that weights and a row leave free."""

_WORDS = ir.VectorType(I16, 2 * WIDTH)
_I8 = ir.IntType(8)
_HALF = ir.HalfType()
_PAIRS_OF_BLOCK = BLOCK // 2
_GROUPS = _PAIRS_OF_BLOCK // 4


def code_bytes(bits: int) -> int:
    """Return the bytes of a panel's weights in one block of inputs."""
    return BLOCK * WIDTH * bits // 8


def block_bytes(bits: int, minimum: bool) -> int:
    """Return the bytes of a panel's weights, float16 scales and minimums in one block of inputs."""
    factors = 0 if bits == 16 else 2 if minimum else 1
    return code_bytes(bits) + 2 * WIDTH * factors


for _size in (code_bytes, block_bytes):
    register_jitable(_size)


def _bf16_bits(value: int) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0] >> 16)


def _table(minimum: bool) -> ir.Constant:
    """Return the bfloat16 value of each 4-bit code, twice, because the fifth index bit belongs to the next code.

    Codes are 0 to 15 if blocks have a minimum, else they represent -8 to 7.
    """
    least = 0 if minimum else -8
    return const(_WORDS, [_bf16_bits(code % 16 + least) for code in range(2 * WIDTH)])


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.load(pointer(builder, builder.add(address, I64(offset)), kind), align=1)


def _halves(builder: Any, address: Any) -> Any:
    """Return 16 float16 values as float32."""
    return builder.fpext(_load(builder, address, 0, ir.VectorType(_HALF, WIDTH)), VEC)


def _four_bit_indices(builder: Any, words: Any) -> list[Any]:
    """Return 32 indices from words of four codes each.

    The code is in the low bits, the bits above the fifth are others.
    """
    return [words if not slot else builder.lshr(words, const(_WORDS, 4 * slot)) for slot in range(4)]


def _unscaled(builder: Any, codes: Any, group: Any, bits: int, minimum: bool) -> list[Any]:
    """Return four vectors of pairs for the group's 8 inputs: codes as bfloat16, or the weights if they are bfloat16."""
    codes = builder.add(codes, builder.mul(group, I64(code_bytes(bits) // _GROUPS)))
    if bits == 16:
        return [_load(builder, codes, pair * 64, PAIRS) for pair in range(4)]
    if bits == 4:
        words = _load(builder, codes, 0, _WORDS)
        kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS])
        permute = llvm.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
        indices = _four_bit_indices(builder, words)
        return [builder.bitcast(builder.call(permute, [_table(minimum), index]), PAIRS) for index in indices]
    return [round_pairs(builder, *_signed_bytes(builder, codes, pair * 2 * WIDTH)) for pair in range(4)]


def _signed_bytes(builder: Any, codes: Any, offset: int) -> list[Any]:
    integers = ir.VectorType(I32, WIDTH)
    halves = [_load(builder, codes, offset + half, ir.VectorType(_I8, WIDTH)) for half in (0, WIDTH)]
    return [builder.sitofp(builder.sext(half, integers), VEC) for half in halves]


def _prefetch_next(builder: Any, block: Any, ahead: Any, size: int) -> None:
    """Prefetch the same block of the next panel; the processor's own prefetcher does not look that far ahead."""
    for line in range(0, size, 64):
        prefetch(builder, builder.add(block, builder.add(ahead, I64(line))))


def _dot_body(builder: Any, values: Any, bits: int, minimum: bool, rows: int) -> None:
    x, x_bytes, sums, sums_bytes, panel, num_blocks, there, tile, tile_bytes = values
    size = block_bytes(bits, minimum)
    scaled = bits != 16
    ahead = builder.mul(num_blocks, I64(size))
    totals = [llvm.alloca_once(builder, VEC) for _ in range(rows)]
    for slot in totals:
        builder.store(const(VEC, 0.0), slot)
    last = builder.sub(there, I64(1))
    indices = [builder.select(builder.icmp_signed("<", I64(row), last), I64(row), last) for row in range(rows)]
    x_rows = [builder.add(x, builder.mul(index, x_bytes)) for index in indices]
    sum_rows = [builder.add(sums, builder.mul(index, sums_bytes)) for index in indices]
    with llvm.for_range_slice(builder, I64(0), num_blocks, I64(1), I64) as (block, _):
        codes = builder.add(panel, builder.mul(block, I64(size)))
        inputs = builder.mul(block, I64(2 * BLOCK))
        _prefetch_next(builder, codes, ahead, size)
        parts = [const(VEC, 0.0) if scaled else builder.load(slot) for slot in totals]
        for group in range(_GROUPS):
            for pair, weights in enumerate(_unscaled(builder, codes, I64(group), bits, minimum)):
                at = builder.add(inputs, I64(16 * group + 4 * pair))
                for row, start in enumerate(x_rows):
                    two = builder.load(pointer(builder, builder.add(start, at), I32), align=2)
                    parts[row] = multiply_add(builder, parts[row], weights, builder.bitcast(splat(builder, two), PAIRS))
        if scaled:
            factors = builder.add(codes, I64(code_bytes(bits)))
            scale = _halves(builder, factors)
            parts = [fma(builder, scale, part, builder.load(slot)) for part, slot in zip(parts, totals)]
            if minimum:
                least = _halves(builder, builder.add(factors, I64(2 * WIDTH)))
                at = builder.mul(block, I64(4))
                for row, start in enumerate(sum_rows):
                    total = builder.load(pointer(builder, builder.add(start, at), F32))
                    parts[row] = fma(builder, least, splat(builder, total), parts[row])
        for part, slot in zip(parts, totals):
            builder.store(part, slot)
    for row, slot in enumerate(totals):
        at = builder.add(tile, builder.mul(tile_bytes, I64(row)))
        builder.store(builder.load(slot), pointer(builder, at, VEC), align=4)


def _describe_dot(bits: int, minimum: int, rows: int) -> tuple[str, Any]:
    name = f"panel_dot_{bits}_{minimum}_{rows}"
    return name, lambda builder, values: _dot_body(builder, values, bits, bool(minimum), rows)


dot = operation(3, 9, _describe_dot)
"""Compute tile[r, lane] = sum over k of x[r, k] * weight[lane, k], float32, for `rows` rows.

Arguments: bits, minimum, rows, x, x_bytes, sums, sums_bytes, panel, num_blocks, num_rows, tile, tile_bytes. Literals:
bits, 4, 8 or 16; minimum, 1 if blocks have one; rows. x: bfloat16, rows x_bytes apart. sums: the sums of x over each
block, float32, rows sums_bytes apart; read if minimum is 1. panel: see layout. Instead of rows beyond num_rows, the
last one is read again; tile has space for all.
"""


def _dot_values_body(builder: Any, values: Any) -> None:
    x, x_bytes, first, second, num_pairs, there, tile, tile_bytes = values
    totals = [[llvm.alloca_once(builder, VEC) for _ in range(2)] for _ in range(VALUE_ROWS)]
    for slot in (slot for row in totals for slot in row):
        builder.store(const(VEC, 0.0), slot)
    last = builder.sub(there, I64(1))
    starts = []
    for row in range(VALUE_ROWS):
        index = builder.select(builder.icmp_signed("<", I64(row), last), I64(row), last)
        starts.append(builder.add(x, builder.mul(index, x_bytes)))
    with llvm.for_range_slice(builder, I64(0), num_pairs, I64(1), I64) as (pair, _):
        offset = builder.mul(pair, I64(64))
        weights = [_load(builder, builder.add(panel, offset), 0, PAIRS) for panel in (first, second)]
        at = builder.mul(pair, I64(4))
        for start, slots in zip(starts, totals):
            two = builder.load(pointer(builder, builder.add(start, at), I32), align=2)
            both = builder.bitcast(splat(builder, two), PAIRS)
            for weight, slot in zip(weights, slots):
                builder.store(multiply_add(builder, builder.load(slot), weight, both), slot)
    for row, slots in enumerate(totals):
        at = builder.add(tile, builder.mul(tile_bytes, I64(row)))
        for half, slot in enumerate(slots):
            builder.store(builder.load(slot), pointer(builder, builder.add(at, I64(64 * half)), VEC), align=4)


dot_values = operation(0, 8, lambda: ("panel_dot_values", _dot_values_body))
"""Compute tile[r, :16] and tile[r, 16:], the sums over k of x[r, k] times the weights of two panels.

Arguments: x, x_bytes, first, second, num_pairs, num_rows, tile, tile_bytes. There are VALUE_ROWS rows. first, second:
[num_pairs, 16, 2] bfloat16. For the other arguments, see `dot`.
"""


def _evens_and_odds(builder: Any, pairs: Any) -> list[Any]:
    """Return the first and the second input of each pair, as float32."""
    integers = ir.VectorType(I32, WIDTH)
    bits = builder.bitcast(pairs, integers)
    halves = [builder.shl(bits, const(integers, 16)), builder.and_(bits, const(integers, 0xFFFF0000))]
    return [builder.bitcast(half, VEC) for half in halves]


def _pairs(builder: Any, first: Any, second: Any) -> Any:
    """Return pairs of rounded first and second inputs; the inverse of `_evens_and_odds`."""
    words = builder.bitcast(round_pairs(builder, first, second), _WORDS)
    lanes = [half * WIDTH + lane for lane in range(WIDTH) for half in range(2)]
    return builder.shuffle_vector(words, ir.Constant(_WORDS, ir.Undefined), const(ir.VectorType(I32, 2 * WIDTH), lanes))


def _unpack_body(builder: Any, values: Any, bits: int, minimum: bool) -> None:
    panel_at, blocks, out_at = values
    size = block_bytes(bits, minimum)
    ahead = builder.mul(blocks, I64(size))
    with llvm.for_range_slice(builder, I64(0), blocks, I64(1), I64) as (block, _):
        codes = builder.add(panel_at, builder.mul(block, I64(size)))
        _prefetch_next(builder, codes, ahead, size)
        target = builder.add(out_at, builder.mul(block, I64(64 * _PAIRS_OF_BLOCK)))
        factors = builder.add(codes, I64(code_bytes(bits)))
        scale = _halves(builder, factors)
        least = _halves(builder, builder.add(factors, I64(2 * WIDTH))) if minimum else None
        with llvm.for_range_slice(builder, I64(0), I64(_GROUPS), I64(1), I64) as (group, _):
            at = builder.add(target, builder.mul(group, I64(256)))
            for pair, unscaled in enumerate(_unscaled(builder, codes, group, bits, minimum)):
                two = _evens_and_odds(builder, unscaled)
                if least is None:
                    two = [builder.fmul(value, scale) for value in two]
                else:
                    two = [fma(builder, value, scale, least) for value in two]
                place = builder.add(at, I64(pair * 64))
                builder.store(_pairs(builder, *two), pointer(builder, place, _WORDS), align=4)


def _describe_unpack(bits: int, minimum: int) -> tuple[str, Any]:
    return f"panel_unpack_{bits}_{minimum}", lambda builder, values: _unpack_body(builder, values, bits, bool(minimum))


unpack = operation(2, 3, _describe_unpack)
"""Write the panel's weights to `out`, [16 * num_blocks, 16, 2] bfloat16, computed in float32.

Arguments: bits, minimum, panel, num_blocks, out. Literals: see `dot`; bits is 4 or 8.
"""
