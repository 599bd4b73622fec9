"""Vectors of 16 float32 as values in numba code, and memory by address.

numba vectorizes loops at its own discretion. Attention needs its accumulators in registers, so its kernels name their
vectors. LLVM splits a vector if the processor's registers are narrower. Memory holds float32 or, if the literal `bf16`
is 1, bfloat16: the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

from kernels.common.cpu import numba_internals as llvm

WIDTH = 16
_PATIENCE = 1000
"""Pauses, some 10 us in total, before a waiting thread yields: longer than threads with a processor each usually wait.
"""

F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VEC = ir.VectorType(F32, WIDTH)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only compiled functions call.

    It has no entry points for Python and C, which takes a tenth of the time. Python must not call the result.
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def inner_numpy(function: Callable[..., Any]) -> Any:
    """Compile as `inner` does, with numpy's result for division by zero."""
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def inner_sums(function: Callable[..., Any]) -> Any:
    """Compile as `inner_numpy` does; sums may be reordered, so that plain loops over a row are vectorized.

    The order depends only on the length of the row.
    """
    reorder = {"reassoc"}
    return njit(error_model="numpy", fastmath=reorder, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


class _VectorType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name=f"float32x{WIDTH}")


vector = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VEC)


def const(value_type: ir.VectorType, value: float | list[int]) -> ir.Constant:
    """Return a vector constant with `value` in every lane, or with these lanes."""
    lanes = value if isinstance(value, list) else [value] * value_type.count
    return ir.Constant(value_type, [ir.Constant(value_type.element, lane) for lane in lanes])


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    """Convert an address to a pointer."""
    return builder.inttoptr(address, to.as_pointer())


def splat(builder: ir.IRBuilder, scalar: ir.Value, width: int = WIDTH) -> ir.Value:
    """Return a vector with the scalar in every lane."""
    kind = ir.VectorType(scalar.type, width)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), const(ir.VectorType(I32, width), 0))


def call(builder: ir.IRBuilder, name: str, kind: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic whose arguments and result have one type."""
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = llvm.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(arguments)), f"llvm.{name}.{suffix}"
    )
    return builder.call(function, arguments)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c, rounded once."""
    return call(builder, "fma", a.type, a, b, c)


def load(builder: ir.IRBuilder, address: ir.Value, bf16: bool, width: int = WIDTH) -> ir.Value:
    """Load `width` adjacent values as float32."""
    wide = ir.VectorType(F32, width)
    if not bf16:
        return builder.load(pointer(builder, address, wide), align=4)
    half = builder.load(pointer(builder, address, ir.VectorType(I16, width)), align=2)
    integers = ir.VectorType(I32, width)
    return builder.bitcast(builder.shl(builder.zext(half, integers), const(integers, 16)), wide)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line of an address, which need not be mapped."""
    anything = ir.PointerType(ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [anything, I32, I32, I32])
    function = llvm.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, anything), I32(0), I32(3), I32(1)])


def to_bf16(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """Convert float32 lanes to bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    integers = ir.VectorType(I32, values.type.count)
    bits = builder.bitcast(values, integers)
    odd = builder.and_(builder.lshr(bits, const(integers, 16)), const(integers, 1))
    rounded = builder.add(bits, builder.add(odd, const(integers, 0x7FFF)))
    quiet = builder.or_(bits, const(integers, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, const(integers, 16)), ir.VectorType(I16, values.type.count))


def store(builder: ir.IRBuilder, address: ir.Value, values: ir.Value, bf16: bool) -> None:
    """Store adjacent values."""
    if bf16:
        half = to_bf16(builder, values)
        builder.store(half, pointer(builder, address, half.type), align=2)
    else:
        builder.store(values, pointer(builder, address, values.type), align=4)


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return exp of each lane, within 2 units in the last place; 0 below -87, its largest value above 88.

    x = n ln 2 + r with |r| <= ln 2 / 2 (two-step reduction after Cody and Waite), Taylor series of degree 7 in r.
    """
    integers = ir.VectorType(I32, WIDTH)
    tiny = builder.fcmp_ordered("olt", x, const(VEC, -87.0))
    x = call(builder, "minnum", VEC, call(builder, "maxnum", VEC, x, const(VEC, -87.0)), const(VEC, 88.0))
    n = call(builder, "nearbyint", VEC, builder.fmul(x, const(VEC, 1.4426950408889634)))
    r = fma(builder, n, const(VEC, -0.693359375), x)
    r = fma(builder, n, const(VEC, 2.12194440e-4), r)
    series = const(VEC, 1.0 / 5040.0)
    for factorial in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        series = fma(builder, series, r, const(VEC, 1.0 / factorial))
    exponent = builder.shl(builder.add(builder.fptosi(n, integers), const(integers, 127)), const(integers, 23))
    return builder.select(tiny, const(VEC, 0.0), builder.fmul(series, builder.bitcast(exponent, VEC)))


def emit(result: Any, arguments: tuple[Any, ...], body: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the signature of an intrinsic and the function that writes its code.

    Args:
        result: Type of the result.
        arguments: Types of the arguments.
        body: Function of a builder and the arguments; it returns the result, or None for a void result.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        out = body(builder, *values)
        return context.get_dummy_value() if out is None else out

    return result(*arguments), codegen


def operation(num_literals: int, count: int, describe: Callable[..., Any], result: Any = types.void) -> Any:
    """Return an intrinsic whose arguments are literals, then `count` int64; its code is shared by all callers.

    Args:
        num_literals: Number of literals.
        count: Number of arguments after them.
        describe: Function of the literals' values that returns the name of the LLVM function and a function that writes
            its body, given a builder and the arguments, and returns its result.
        result: types.void or types.int64.
    """

    @intrinsic(prefer_literal=True)
    def call(typing: Any, *arguments: Any) -> Any:
        literals = arguments[:num_literals]
        name, body = describe(*(literal.literal_value for literal in literals))

        def write(builder: Any, packed: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType() if result is types.void else I64, [I64] * count)
            function = llvm.get_or_insert_function(builder.module, kind, name)
            if function.is_declaration:
                function.linkage = "internal"
                function.attributes.add("noinline")
                inside = ir.IRBuilder(function.append_basic_block("entry"))
                value = body(inside, list(function.args))
                if value is None:
                    inside.ret_void()
                else:
                    inside.ret(value)
            values = [builder.extract_value(packed, num_literals + i) for i in range(count)]
            value = builder.call(function, values)
            return None if result is types.void else value

        return emit(result, (types.StarArgTuple([*literals, *[types.int64] * count]),), write)

    return call


@intrinsic(prefer_literal=True)
def vload(typing: Any, address: Any, bf16: Any) -> Any:
    """Load 16 adjacent values from an address."""
    narrow = bool(bf16.literal_value)
    return emit(vector, (types.int64, bf16), lambda b, a, _: load(b, a, narrow))


@intrinsic(prefer_literal=True)
def vstore(typing: Any, address: Any, values: Any, bf16: Any) -> Any:
    """Store 16 adjacent values."""
    narrow = bool(bf16.literal_value)
    return emit(types.void, (types.int64, vector, bf16), lambda b, a, v, _: store(b, a, v, narrow))


@intrinsic(prefer_literal=True)
def vscatter(typing: Any, stride: Any, bf16: Any, address: Any, values: Any) -> Any:
    """Store lane i `stride` values after lane i - 1; `stride` and `bf16` are literals."""
    narrow = bool(bf16.literal_value)
    step = stride.literal_value * (2 if narrow else 4)

    def body(b: Any, _stride: Any, _bf16: Any, a: Any, v: Any) -> None:
        lanes = to_bf16(b, v) if narrow else v
        for lane in range(WIDTH):
            target = pointer(b, b.add(a, I64(lane * step)), lanes.type.element)
            b.store(b.extract_element(lanes, I32(lane)), target)

    return emit(types.void, (stride, bf16, types.int64, vector), body)


@intrinsic
def vsplat(typing: Any, scalar: Any) -> Any:
    """Return a vector with the scalar in every lane."""
    return emit(vector, (types.float32,), splat)


@intrinsic
def vadd(typing: Any, x: Any, y: Any) -> Any:
    """Return x + y."""
    return emit(vector, (vector, vector), lambda b, x, y: b.fadd(x, y))


@intrinsic
def vsub(typing: Any, x: Any, y: Any) -> Any:
    """Return x - y."""
    return emit(vector, (vector, vector), lambda b, x, y: b.fsub(x, y))


@intrinsic
def vmul(typing: Any, x: Any, y: Any) -> Any:
    """Return x * y."""
    return emit(vector, (vector, vector), lambda b, x, y: b.fmul(x, y))


@intrinsic
def vdiv(typing: Any, x: Any, y: Any) -> Any:
    """Return x / y."""
    return emit(vector, (vector, vector), lambda b, x, y: b.fdiv(x, y))


@intrinsic
def vfma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z."""
    return emit(vector, (vector, vector, vector), fma)


@intrinsic
def vmax(typing: Any, x: Any, y: Any) -> Any:
    """Return the larger value of each lane; a NaN lane keeps the other's value."""
    return emit(vector, (vector, vector), lambda b, x, y: call(b, "maxnum", VEC, x, y))


@intrinsic
def vexp(typing: Any, x: Any) -> Any:
    """Return exp of each lane."""
    return emit(vector, (vector,), exp)


@intrinsic
def vsilu(typing: Any, x: Any) -> Any:
    """Return x / (1 + exp(-x)) of each lane. The sum stays finite, because exp is at most exp(88)."""

    def body(b: Any, v: Any) -> Any:
        return b.fdiv(v, b.fadd(const(VEC, 1.0), exp(b, b.fsub(const(VEC, 0.0), v))))

    return emit(vector, (vector,), body)


@intrinsic
def vkeep(typing: Any, x: Any, count: Any, other: Any) -> Any:
    """Keep lanes below `count` and replace the others by `other`."""

    def body(b: Any, v: Any, limit: Any, fill: Any) -> Any:
        index = const(ir.VectorType(I64, WIDTH), list(range(WIDTH)))
        return b.select(b.icmp_signed("<", index, splat(b, limit)), v, splat(b, fill))

    return emit(vector, (vector, types.int64, types.float32), body)


@intrinsic
def vdrop(typing: Any, x: Any, count: Any, other: Any) -> Any:
    """Keep lanes from `count` on and replace the others by `other`."""

    def body(b: Any, v: Any, limit: Any, fill: Any) -> Any:
        index = const(ir.VectorType(I64, WIDTH), list(range(WIDTH)))
        return b.select(b.icmp_signed("<", index, splat(b, limit)), splat(b, fill), v)

    return emit(vector, (vector, types.int64, types.float32), body)


def fold(builder: Any, values: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine all lanes to one value, by halves."""
    width = WIDTH
    while width > 1:
        width //= 2
        low = const(ir.VectorType(I32, width), list(range(width)))
        high = const(ir.VectorType(I32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(values.type, ir.Undefined)
        values = combine(
            builder.shuffle_vector(values, undefined, low), builder.shuffle_vector(values, undefined, high)
        )
    return builder.extract_element(values, I32(0))


@intrinsic
def vsum(typing: Any, x: Any) -> Any:
    """Return the sum of the lanes, by halves."""
    return emit(types.float32, (vector,), lambda b, v: fold(b, v, b.fadd))


@intrinsic
def vhighest(typing: Any, x: Any) -> Any:
    """Return the largest lane."""
    return emit(
        types.float32, (vector,), lambda b, v: fold(b, v, lambda x, y: b.select(b.fcmp_ordered("ogt", x, y), x, y))
    )


@intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    """Load one float32."""
    return emit(types.float32, (types.int64,), lambda b, a: b.load(pointer(b, a, F32)))


@intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Store one float32."""

    def body(b: Any, a: Any, v: Any) -> None:
        b.store(v, pointer(b, a, F32))

    return emit(types.void, (types.int64, types.float32), body)


@intrinsic
def load_i32(typing: Any, address: Any) -> Any:
    """Load one int32 as int64."""
    return emit(types.int64, (types.int64,), lambda b, a: b.sext(b.load(pointer(b, a, I32)), I64))


@intrinsic
def load_i64(typing: Any, address: Any) -> Any:
    """Load one int64."""
    return emit(types.int64, (types.int64,), lambda b, a: b.load(pointer(b, a, I64)))


@intrinsic
def atomic_add(typing: Any, address: Any, value: Any) -> Any:
    """Add to an int64 that threads share; return its previous value."""
    return emit(
        types.int64, (types.int64, types.int64), lambda b, a, v: b.atomic_rmw("add", pointer(b, a, I64), v, "seq_cst")
    )


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    """Load an int64 that another thread may be changing."""
    return emit(types.int64, (types.int64,), lambda b, a: b.load_atomic(pointer(b, a, I64), "seq_cst", 8))


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this thread waits for another."""

    def body(b: Any) -> None:
        if b.module.triple.startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(llvm.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])

    return emit(types.void, (), body)


@intrinsic
def give_way(typing: Any) -> Any:
    """Yield this processor to a waiting thread."""

    def body(b: Any) -> None:
        b.call(llvm.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])

    return emit(types.void, (), body)


@njit
def wait_for(counter: Any, count: Any) -> None:
    """Wait until an int64 that other threads increase has reached `counter`.

    With more threads than processors, the awaited thread may have none. Spinning would keep the processor from it for
    milliseconds at each of a step's two hundred barriers.
    """
    turns = 0
    while atomic_load(counter) < count:
        if turns < _PATIENCE:
            turns += 1
            pause()
        else:
            give_way()
