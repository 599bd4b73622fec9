"""Rounding from float32 to a kernel's result, the same on a GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.triton.launch import INTERPRETED

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
