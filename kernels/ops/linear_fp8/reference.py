"""Products of FP8 codes in plain torch, in float64."""

from __future__ import annotations

import torch

from kernels.common.quantized import BLOCK, QuantizedActivation
from kernels.ops.linear_fp8.inputs import Fp8Weight


def weight_values(weight: Fp8Weight) -> torch.Tensor:
    """Return the values, [N, K] float64."""
    rows, width = weight.codes.shape
    scales = weight.scales.double()
    if not weight.blocks:
        return weight.codes.double() * scales[:, None]
    scales = scales.repeat_interleave(weight.rows_per_scale, dim=0)[:rows]
    return weight.codes.double() * scales.repeat_interleave(BLOCK, dim=1)[:, :width]


def linear_fp8(x: QuantizedActivation, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply [T, K] codes by [N, K] codes -> [T, N] of x.dtype.

    Args:
        x: Activations of the format fp8_tensor or fp8_token; fp8_block if the weight's scales are blocks.
        weight: The weight.
        bias: [N], or None.
    """
    width = x.codes.shape[1]
    scales = x.scales.double()
    if weight.blocks:
        scales = scales.repeat_interleave(BLOCK, dim=1)[:, :width]
    out = (x.codes.double() * scales) @ weight_values(weight).T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)
