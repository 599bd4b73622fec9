"""The parts of a layer that threads share out, and how they wait for each other.

A phase is cut into as many pieces as there are threads. A thread takes pieces by a counter and counts those that are
done; everybody waits until all are, however many threads there are and however late one comes: what a late one
computes from a residual that has moved on is for pieces that are taken already, and is never used.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from kernels.activation.cpu import gate_row
from kernels.cpu.simd import atomic_add, atomic_load, load_i64, pause
from kernels.linear_weight_only.cpu import share_out
from kernels.norm.cpu import norm_row


@njit(inline="always")
def wait_for(counter: Any, count: Any) -> None:
    """Until as many pieces are done."""
    while atomic_load(counter) < count:
        pause()


@njit(inline="always")
def normalise(residual: Any, weight: Any, out: Any, rows: Any, hidden: Any, eps: Any) -> None:
    """out, bfloat16: kernels/norm of rows of the float32 residual, to which nothing is added."""
    for row in range(rows):
        norm_row(0, 0, residual + row * hidden * 4, weight, out + row * hidden * 2, hidden, eps, 1)


@njit(inline="always")
def gate(source: Any, out: Any, rows: Any, width: Any) -> None:
    """out, bfloat16: kernels/activation of each row."""
    for row in range(rows):
        gate_row(source + row * 4 * width, out + row * 2 * width, width, 1)


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
    done = share_out(
        bits, minimum, add, rows, x, num_in, load_i64(linear), load_i64(linear + 8), load_i64(linear + 16), out,
        num_out, pieces, counters,
    )  # fmt: skip
    atomic_add(counters + 8, done)
    wait_for(counters + 8, pieces)
