"""Arithmetic shared by kernels: rounding, floats that compare as integers, and attention scores."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.triton.launch import INTERPRETED

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


_TRUNCATES = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """Round float32 to TYPE, to nearest, ties to even. The interpreter of Triton 3.9 truncates to bfloat16."""
    if _TRUNCATES and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x != x, x, nearest).to(TYPE)
    else:
        return x.to(TYPE)


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32, accurate at both ends: 1 - 2 / (exp(2 x) + 1)."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def scaled_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Convert q . k to scores in units of log2, so that weights are exp2(score - maximum).

    `scale` and `softcap` are those of AttentionGeometry; softcap * tanh(score / softcap) if HAS_SOFTCAP.
    """
    if HAS_SOFTCAP:
        scores = tanh(products * (scale / softcap)) * (softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    return scores
