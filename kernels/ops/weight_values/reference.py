"""The values of integer weights, in float64."""

from __future__ import annotations

import torch

from kernels.ops.linear_weight_only import reference
from kernels.ops.linear_weight_only.layout import PackedWeight


def values_of(weight: PackedWeight, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """[last - first, in] of output features first..last, rounded once to `dtype`."""
    return reference.values(weight)[first:last].to(dtype)
