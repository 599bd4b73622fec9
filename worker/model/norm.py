"""RMS normalisation layers."""

from __future__ import annotations

import torch

from kernels.backends.reference import DecoderOps
from kernels.common.quantized import ActivationQuantization, Activations


class RMSNorm:
    """Adds a block's output to the residual stream and normalises it."""

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        ops: DecoderOps,
        quantization: ActivationQuantization | None = None,
    ) -> None:
        """weight: [hidden] float32; dtype: of the result, or of the activations that `quantization` makes codes of."""
        self.weight = weight
        self._quantization = quantization
        self._eps = eps
        self._dtype = dtype
        self._ops = ops

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor) -> Activations:
        """residual += delta in place; returns the normalised residual, [T, hidden]."""
        return self._ops.add_rms_norm(delta, residual, self.weight, self._eps, self._dtype, self._quantization)
