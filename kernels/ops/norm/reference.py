"""RMS normalization with preceding residual addition, in plain torch."""

from __future__ import annotations

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.quantize.reference import quantize


def add_rms_norm(
    delta: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    quantization: ActivationQuantization | None = None,
) -> Activations:
    """Add delta to the residual in place and return residual / sqrt(mean(residual^2) + eps) * weight.

    The norm is that of Zhang and Sennrich (2019).

    Args:
        delta: [T, hidden] output of the last block, any float dtype; None to add nothing.
        residual: [T, hidden] residual stream, updated in its own dtype.
        weight: [hidden] float32.
        eps: Epsilon of the norm.
        dtype: Dtype of the result [T, hidden]; the arithmetic is float32.
        quantization: Format in which the next linear layer reads the result; None for no quantization.
    """
    if delta is not None:
        residual.add_(delta)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out = (wide * scale * weight).to(dtype)
    return out if quantization is None else quantize(out, quantization)
