"""Products with integer weights, in float64."""

from __future__ import annotations

import torch

from kernels.ops.weight_values.layout import PackedWeight
from kernels.ops.weight_values.reference import values


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute [T, in] @ [out, in].T + [out] -> [T, out] of x's dtype, rounded once."""
    result = x.double() @ values(weight).T
    if bias is not None:
        result += bias.double()
    return result.to(x.dtype)
