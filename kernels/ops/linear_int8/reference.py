"""Products of int8 codes in plain torch, exact until they are scaled."""

from __future__ import annotations

import torch

from kernels.common.quantized import QuantizedActivation


def linear_int8(
    x: QuantizedActivation, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply [T, K] int8_token activations by an int8 weight -> [T, N] of x.dtype.

    Args:
        x: The activations.
        codes: [N, K] int8.
        scales: [N] float32, one per output feature: value = code * scale.
        bias: [N], or None.
    """
    out = (x.codes.double() @ codes.double().T) * x.scales.double() * scales.double()
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)
