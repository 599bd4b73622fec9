"""The parts of a layer that threads share out, and how they wait for each other.

A thread takes pieces of a phase by a counter and counts those that are done; everybody waits until all are, however
many threads there are and however late one comes: what a late one computes from a residual that has moved on is for
pieces that are taken already, and is never used.
"""

from __future__ import annotations

from typing import Any

from numba import literally

from kernels.common.cpu.simd import atomic_add, inner, load_i64, wait_for
from kernels.ops.linear_panels.cpu import block_sums, num_pieces, share_out
from kernels.ops.norm.cpu import norm_row

OWN_ROWS = 8
"""Up to these every thread normalises for itself."""
_SHARED_ROWS = 4
"""Beyond, it takes so many at a time."""
_DONE = 8
"""Bytes from a phase's counter of pieces that are taken to that of pieces that are done."""


@inner
def normalise(
    residual: Any, weight: Any, own: Any, shared: Any, rows: Any, hidden: Any, eps: Any, counters: Any
) -> Any:
    """kernels/ops/norm of rows of the float32 residual, to which nothing is added; returns where they are, as bfloat16.

    A few rows every thread normalises for itself, which is cheaper than waiting for another to do it.
    """
    if rows <= OWN_ROWS:
        for row in range(rows):
            norm_row(0, 0, residual + row * hidden * 4, weight, own + row * hidden * 2, hidden, eps, 1)
        return own
    while True:
        first = atomic_add(counters, 1) * _SHARED_ROWS
        if first >= rows:
            break
        last = min(first + _SHARED_ROWS, rows)
        for row in range(first, last):
            norm_row(0, 0, residual + row * hidden * 4, weight, shared + row * hidden * 2, hidden, eps, 1)
        atomic_add(counters + _DONE, last - first)
    wait_for(counters + _DONE, rows)
    return shared


@inner
def project(
    bits: Any,
    minimum: Any,
    result: Any,
    few: Any,
    rows: Any,
    x: Any,
    num_in: Any,
    sums: Any,
    linear: Any,
    out: Any,
    num_out: Any,
    threads: Any,
    counters: Any,
    scratch: Any,
) -> None:
    """`share_out` of x @ weight.T + bias; ends when all of it is there.

    linear: address of two int64, the addresses of panels and bias. counters: two int64 of zeros.
    """
    literally(bits)
    literally(minimum)
    if few and minimum == 1:
        block_sums(x, rows, num_in, sums)
    done = share_out(
        bits, minimum, result, few, rows, x, num_in, sums, load_i64(linear), load_i64(linear + 8), out, num_out,
        threads, counters, scratch,
    )  # fmt: skip
    atomic_add(counters + _DONE, done)
    wait_for(counters + _DONE, num_pieces(result, few, rows, num_out, threads))
