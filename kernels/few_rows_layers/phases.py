"""The parts of a layer that threads share out, and how they wait for each other.

A phase is cut into as many pieces as there are threads. A thread takes pieces by a counter and counts those that are
done; everybody waits until all are, however many threads there are and however late one comes: what a late one
computes from a residual that has moved on is for pieces that are taken already, and is never used.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from kernels.cpu.simd import (
    atomic_add,
    atomic_load,
    load_i64,
    pause,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from kernels.linear_weight_only.cpu import dot_any


@njit(inline="always")
def wait_for(counter: Any, count: Any) -> None:
    """Until as many pieces are done."""
    while atomic_load(counter) < count:
        pause()


@njit(inline="always")
def normalise(residual: Any, weight: Any, out: Any, rows: Any, hidden: Any, eps: Any) -> None:
    """out, bfloat16: rows of the float32 residual, divided by their root mean square, times the weight."""
    for row in range(rows):
        base = residual + row * hidden * 4
        squares = vsplat(0.0)
        for i in range(0, hidden, 16):
            x = vload(base + i * 4, 0)
            squares = vfma(x, x, squares)
        scale = vsplat(types.float32(1.0) / (vsum(squares) / types.float32(hidden) + eps) ** types.float32(0.5))
        for i in range(0, hidden, 16):
            x = vmul(vmul(vload(base + i * 4, 0), scale), vload(weight + i * 4, 0))
            vstore(out + (row * hidden + i) * 2, x, 1)


@njit(inline="always")
def gate(source: Any, out: Any, rows: Any, width: Any) -> None:
    """out, bfloat16: SiLU of the first half of each row times the second, see kernels/activation."""
    one, zero = vsplat(1.0), vsplat(0.0)
    for row in range(rows):
        base = source + row * 4 * width
        for i in range(0, width, 16):
            x = vload(base + i * 2, 1)
            x = vdiv(x, vadd(one, vexp(vsub(zero, x))))
            vstore(out + (row * width + i) * 2, vmul(x, vload(base + (width + i) * 2, 1)), 1)


@njit(inline="always")
def project(
    bits: Any,
    minimum: Any,
    add: Any,
    rows: Any,
    x: Any,
    num_in: Any,
    linear: Any,
    out: Any,
    num_out: Any,
    pieces: Any,
    counters: Any,
) -> None:
    """out = x @ weight.T + bias in bfloat16, or, where add is 1, added to float32; ends when all of it is there.

    linear: address of three int64, the addresses of codes, factors and bias. counters: two int64 of zeros.
    """
    codes, factors, bias = load_i64(linear), load_i64(linear + 8), load_i64(linear + 16)
    num_blocks = num_in // 32
    code_bytes = num_blocks * (16 if bits == 4 else 32)
    factor_bytes = num_blocks * (8 if minimum == 1 else 4)
    element = 4 if add == 1 else 2
    size = (num_out + pieces - 1) // pieces
    while True:
        piece = atomic_add(counters, 1)
        if piece >= pieces:
            break
        for n in range(piece * size, min(piece * size + size, num_out)):
            b = bias + n * 2 if bias != 0 else 0
            dot_any(
                bits, minimum, add, rows, x, num_in * 2, codes + n * code_bytes, factors + n * factor_bytes,
                num_blocks, b, out + n * element, num_out * element,
            )  # fmt: skip
        atomic_add(counters + 8, 1)
    wait_for(counters + 8, pieces)
