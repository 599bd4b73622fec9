"""Phases of a layer that threads divide among themselves, and their synchronization.

A thread takes pieces of a phase from a counter and counts the pieces that are done. All threads wait until all pieces
are done, whatever the number of threads and however late one starts. A late thread may read a residual that has
already changed, but the pieces it computes have already been taken, so its results are never used.
"""

from __future__ import annotations

from typing import Any

from numba import literally

from kernels.common.cpu.simd import atomic_add, inner, load_i64, wait_for
from kernels.ops.linear_panels.cpu import block_sums, num_pieces, share_out
from kernels.ops.norm.cpu import norm_row

OWN_ROWS = 8
"""Maximum number of rows that every thread normalizes by itself."""
_SHARED_ROWS = 4
"""Number of rows per piece when the threads divide the normalization."""
_DONE = 8
"""Offset in bytes from a phase's counter of taken pieces to its counter of finished pieces."""


@inner
def normalize(
    residual: Any, weight: Any, own: Any, shared: Any, rows: Any, hidden: Any, eps: Any, counters: Any
) -> Any:
    """Normalize rows of the float32 residual and return the address of the bfloat16 result.

    The operation is kernels/ops/norm without addition. Every thread normalizes a small number of rows by itself, which
    is cheaper than waiting for another thread.
    """
    if rows <= OWN_ROWS:
        for row in range(rows):
            norm_row(False, 0, residual + row * hidden * 4, weight, own + row * hidden * 2, hidden, eps, 1)
        return own
    while True:
        first = atomic_add(counters, 1) * _SHARED_ROWS
        if first >= rows:
            break
        last = min(first + _SHARED_ROWS, rows)
        for row in range(first, last):
            norm_row(False, 0, residual + row * hidden * 4, weight, shared + row * hidden * 2, hidden, eps, 1)
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
    """Compute x @ weight.T + bias with `share_out` and wait until all of it is done.

    linear: address of two int64, the addresses of panels and bias. counters: two int64 zeros.
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
