"""Operations of attention kernels on scores between the two products."""

from __future__ import annotations

import triton
import triton.language as tl

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
