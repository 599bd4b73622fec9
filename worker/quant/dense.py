"""Dense weights in torch's layout: on GPUs, and on processors where oneDNN does not support a dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common.quantized import ActivationQuantization, Activations, dense
from worker.quant.raw_weight import RawWeight


class DenseScheme:
    """Weights in the model's dtype, multiplied by torch's own linear."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.input_quantization: ActivationQuantization | None = None
        self.device = device
        self.weight = torch.empty(0)

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate [out_features, in_features]."""
        self.weight = torch.empty((out_features, in_features), dtype=self.dtype, device=self.device)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Copy values and convert dtype and device."""
        values = raw.dequantize(self.dtype)
        self.weight[start : start + raw.shape[0]].copy_(values if order is None else values[order])

    def after_load(self) -> None:
        """Do nothing: the layout is torch's."""

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return F.linear(dense(x), self.weight, bias)


class InvariantScheme(DenseScheme):
    """Weights on a GPU whose products do not depend on the batch, for deterministic mode.

    kernels/ops/linear_dense uses one tile and one order of summation for all row counts.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        from kernels.ops.linear_dense.triton import linear_dense  # a CPU runs without triton

        self._linear = linear_dense

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return self._linear(dense(x), self.weight, bias)
