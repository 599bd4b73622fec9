"""RMS normalisation with the residual addition before it, in plain torch."""

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
    """Residual += delta (in place), then residual / sqrt(mean(residual^2) + eps) * weight (Zhang and Sennrich 2019).

    Args:
        delta: [T, hidden] output of the last block, any float dtype; None: nothing to add.
        residual: [T, hidden] residual stream; updated in its own dtype.
        weight: [hidden] float32.
        dtype: of the result [T, hidden]; the arithmetic is float32.
        quantization: how the linear layer behind it wants the result, if not as it is.
    """
    if delta is not None:
        residual.add_(delta)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out = (wide * scale * weight).to(dtype)
    return out if quantization is None else quantize(out, quantization)
