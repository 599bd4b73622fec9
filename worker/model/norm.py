"""RMS normalisation layers."""

from __future__ import annotations

import torch

from kernels.dispatch import Ops


class RMSNorm:
    """Adds a block's output to the residual stream and normalises it."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype, ops: Ops) -> None:
        """weight: [hidden] float32; dtype: of the result."""
        self._weight = weight
        self._eps = eps
        self._dtype = dtype
        self._ops = ops

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual += delta in place; returns the normalised residual, [T, hidden]."""
        return self._ops.add_rms_norm(delta, residual, self._weight, self._eps, self._dtype)


class HeadNorm:
    """Normalises each head's query or key (QK norm) before it is rotated."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [head_dim] float32."""
        self._weight = weight
        self._eps = eps

    def apply_(self, heads: torch.Tensor) -> None:
        """heads: [T, num_heads, head_dim], changed in place."""
        wide = heads.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._eps)
        heads.copy_(wide * scale * self._weight)
