"""Dense weights in oneDNN's blocked layout, which avoids reordering the weight for each product."""

from __future__ import annotations

import torch

from kernels.common.quantized import ActivationQuantization, Activations, dense
from worker.quant.raw_weight import RawWeight

# Row count for which the layout is chosen: decoding of a moderate batch. Products with other counts are correct too.
_ROWS_HINT = 16


class OneDNNPackedScheme:
    """bfloat16 or float16 weights on the CPU, packed once at load."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.input_quantization: ActivationQuantization | None = None
        self._weight = torch.empty(0)

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate the plain layout, which is freed in `after_load`."""
        self._weight = torch.empty((out_features, in_features), dtype=self.dtype)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Copy values and convert the dtype."""
        values = raw.dequantize(self.dtype)
        self._weight[start : start + raw.shape[0]].copy_(values if order is None else values[order])

    def after_load(self) -> None:
        """Pack the weight and free the plain layout."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _ROWS_HINT)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, accumulated in float32."""
        x = dense(x)
        if x.shape[0] == 1 and self.dtype is torch.float32:
            # A single row would be summed in another order than the same row in a batch.
            return self._multiply(x.expand(2, -1).contiguous(), bias)[:1]
        return self._multiply(x, bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return out
