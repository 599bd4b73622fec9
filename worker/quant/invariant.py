"""Dense weights on a GPU whose products do not depend on the batch, for deterministic mode."""

from __future__ import annotations

import torch

from kernels.common.quantized import Activations, dense
from worker.quant.dense import DenseScheme


class InvariantScheme(DenseScheme):
    """Weights in the model's dtype, multiplied by kernels/ops/linear_dense.

    It uses one tile and one order for all row counts.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        from kernels.ops.linear_dense.triton import linear_dense  # a CPU runs without triton

        self._linear = linear_dense

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return self._linear(dense(x), self.weight, bias)
