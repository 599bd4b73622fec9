"""RMS normalization layers."""

from __future__ import annotations

import torch

from kernels.backends.reference import DecoderOps
from kernels.common.quantized import ActivationQuantization, Activations


class RMSNorm:
    """Addition of a block's output to the residual stream, and normalization."""

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        ops: DecoderOps,
        quantization: ActivationQuantization | None = None,
    ) -> None:
        """Create the layer.

        Args:
            weight: [hidden] float32.
            eps: Epsilon of the norm.
            dtype: Dtype of the result, or of the activations that `quantization` converts to codes.
            ops: Operations of the device.
            quantization: Quantization of the result; None for none.
        """
        self.weight = weight
        self._quantization = quantization
        self._eps = eps
        self._dtype = dtype
        self._ops = ops

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor) -> Activations:
        """Add delta to the residual in place; return the normalized residual, [T, hidden]."""
        return self._ops.add_rms_norm(delta, residual, self.weight, self._eps, self._dtype, self._quantization)
