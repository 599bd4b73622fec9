"""The inner product of a row of integer weights with a few rows of activations, with its accumulators in registers.

Written as LLVM IR around two instructions of AVX512-BF16: one rounds 32 weights to bfloat16, the other multiplies 32
pairs and adds up neighbours in float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kernels.cpu.simd import F32, I32, I64, VEC, WIDTH, const, fma, fold, load_bf16_scalar, pointer, splat, store

BLOCK = 32
"""Inputs that share a scale and a minimum."""
CODE_BYTES = {4: 16, 8: 32}
"""Bytes of a block's codes."""

_I8 = ir.IntType(8)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), BLOCK)


def supported() -> bool:
    """Whether this processor has the instructions."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512bf16")) and bool(features.get("avx512bw"))


def _round(builder: Any, low: Any, high: Any) -> Any:
    kind = ir.FunctionType(_PAIRS, [VEC, VEC])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [high, low])


def _multiply_add(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(VEC, [VEC, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [sums, a, b])


def _half(builder: Any, codes: Any, first: int) -> Any:
    lanes = const(ir.VectorType(I32, WIDTH), list(range(first, first + WIDTH)))
    return builder.shuffle_vector(codes, ir.Constant(codes.type, ir.Undefined), lanes)


def _codes(builder: Any, address: Any, bits: int) -> list[Any]:
    """The 32 codes of a block as two vectors of float32."""
    kind = ir.VectorType(_I8, CODE_BYTES[bits])
    integers = ir.VectorType(I32, WIDTH)
    packed = builder.load(pointer(builder, address, kind), align=1)
    if bits == 4:
        halves = [builder.and_(packed, const(kind, 15)), builder.lshr(packed, const(kind, 4))]
        return [builder.uitofp(builder.zext(half, integers), VEC) for half in halves]
    return [builder.sitofp(builder.sext(_half(builder, packed, first), integers), VEC) for first in (0, WIDTH)]


def _weights(builder: Any, block: Any, codes: Any, factors: Any, bits: int, minimum: bool) -> Any:
    """The weights of a block: codes times scale plus minimum in float32, rounded to bfloat16."""
    at = builder.add(factors, builder.mul(block, I64(8 if minimum else 4)))
    scale = splat(builder, builder.load(pointer(builder, at, F32)))
    halves = _codes(builder, builder.add(codes, builder.mul(block, I64(CODE_BYTES[bits]))), bits)
    if minimum:
        least = splat(builder, builder.load(pointer(builder, builder.add(at, I64(4)), F32)))
        return _round(builder, *(fma(builder, half, scale, least) for half in halves))
    return _round(builder, *(builder.fmul(half, scale) for half in halves))


def _dot_body(builder: Any, values: Any, bits: int, minimum: bool, add: bool, most: int) -> None:
    x_at, there, step, codes_at, factors_at, blocks, bias_at, out_at, out_step = values
    # Few rows wait for each other's sums, so even and odd blocks are summed apart.
    chains = 2 if most < 4 else 1
    sums = [[cgutils.alloca_once(builder, VEC) for _ in range(chains)] for _ in range(most)]
    for slot in (slot for row in sums for slot in row):
        builder.store(const(VEC, 0.0), slot)
    last = builder.sub(there, I64(1))
    starts = []
    for row in range(most):
        index = builder.select(builder.icmp_signed("<", I64(row), last), I64(row), last)
        starts.append(builder.add(x_at, builder.mul(index, step)))
    with cgutils.for_range_slice(builder, I64(0), blocks, I64(chains), I64) as (first, _):
        for chain in range(chains):
            block = builder.add(first, I64(chain))
            weights = _weights(builder, block, codes_at, factors_at, bits, minimum)
            offset = builder.mul(block, I64(2 * BLOCK))
            for start, row_sums in zip(starts, sums):
                pairs = builder.load(pointer(builder, builder.add(start, offset), _PAIRS), align=2)
                slot = row_sums[chain]
                builder.store(_multiply_add(builder, builder.load(slot), weights, pairs), slot)
    added = load_bf16_scalar(builder, bias_at)
    for row, row_sums in enumerate(sums):
        vector = builder.load(row_sums[0])
        for slot in row_sums[1:]:
            vector = builder.fadd(vector, builder.load(slot))
        total = builder.fadd(fold(builder, vector, builder.fadd), added)
        with builder.if_then(builder.icmp_signed("<", I64(row), there)):
            at = builder.add(out_at, builder.mul(out_step, I64(row)))
            if add:
                place = pointer(builder, at, F32)
                builder.store(builder.fadd(builder.load(place), total), place)
            else:
                store(builder, at, splat(builder, total, 1), True)


def _dot_function(module: Any, bits: int, minimum: bool, add: bool, most: int) -> Any:
    """A function of the module, made once for all places that call it."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 9)
    function = cgutils.get_or_insert_function(module, kind, f"dot_rows_{bits}_{int(minimum)}_{int(add)}_{most}")
    if function.is_declaration:
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        _dot_body(builder, function.args, bits, minimum, add, most)
        builder.ret_void()
    return function


@intrinsic(prefer_literal=True)
def dot_rows(
    typing: Any,
    bits: Any,
    minimum: Any,
    add: Any,
    rows: Any,
    x: Any,
    num_rows: Any,
    row_bytes: Any,
    codes: Any,
    factors: Any,
    num_blocks: Any,
    bias: Any,
    out: Any,
    out_bytes: Any,
) -> Any:
    """out[r] = sum over k of x[r, k] * weight[k] + bias for `num_rows` rows, at most the literal `rows`.

    Literals: bits, 4 or 8; minimum, 1 where blocks have one; add; rows. x: bfloat16, row_bytes apart. codes: num_blocks
    times 16 or 32 bytes, factors: float32, for each block its scale and minimum; num_blocks is even. bias: the address
    of a bfloat16, or 0. out: bfloat16, out_bytes apart; where add is 1 float32, to which the result is added. Rows that
    are not there are computed as the last one and not written.
    """
    choice = bits.literal_value, bool(minimum.literal_value), bool(add.literal_value), rows.literal_value

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.call(_dot_function(builder.module, *choice), values[4:])
        return context.get_dummy_value()

    arguments = (bits, minimum, add, rows, *[types.int64] * 9)
    return types.void(*arguments), codegen


@intrinsic(prefer_literal=True)
def write_blocks(typing: Any, bits: Any, minimum: Any, codes: Any, factors: Any, num_blocks: Any, out: Any) -> Any:
    """out: the weights of num_blocks blocks, bfloat16. Literals: bits, minimum; see `dot_rows`."""
    width, has_minimum = bits.literal_value, bool(minimum.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        codes_at, factors_at, blocks, out_at = values[2:]
        with cgutils.for_range_slice(builder, I64(0), blocks, I64(1), I64) as (block, _):
            weights = _weights(builder, block, codes_at, factors_at, width, has_minimum)
            target = builder.add(out_at, builder.mul(block, I64(2 * BLOCK)))
            builder.store(weights, pointer(builder, target, _PAIRS), align=2)
        return context.get_dummy_value()

    return types.void(bits, minimum, *[types.int64] * 4), codegen
