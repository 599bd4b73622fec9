"""Floats as integers that compare like them, with NaN largest, so that a maximum handles NaN without special cases."""

from __future__ import annotations

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
MINUS_INFINITY = tl.constexpr(-0x7F800001)
NONE = tl.constexpr(-0x80000000)
"""Smaller than every number."""


@triton.jit
def order_of(b_number):
    """Convert float32 to int32; minus zero becomes zero."""
    b_number = tl.where(b_number == 0.0, 0.0, b_number)
    b_bits = b_number.to(tl.int32, bitcast=True)
    return tl.where(b_number != b_number, NAN, b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF))


@triton.jit
def number_of(order):
    """Convert the result of order_of back."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
