"""Dense weights in oneDNN's blocked layout, which avoids reordering the weight for each product.

torch has no public interface for this layout, so this module, and no other, calls the private operators of
`torch.ops.mkldnn`. tests/unit/worker/quant/test_onednn_packed.py fails if their schemas change.
"""

from __future__ import annotations

import torch

from kernels.common.quantized import Activations, dense
from worker.quant.dense import DenseScheme

# Row count for which the layout is chosen: decoding of a moderate batch. Products with other counts are correct too.
_ROWS_HINT = 16


def packed_linears_supported(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies packed weights of this dtype natively on this processor.

    In float32 they take half to two thirds of the time of torch's own linear.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def pack(weight: torch.Tensor, num_rows: int = _ROWS_HINT) -> torch.Tensor:
    """Return a weight [out, in] in the layout that oneDNN chooses for products with `num_rows` rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias for a weight from `pack`, accumulated in float32."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class OneDNNPackedScheme(DenseScheme):
    """Weights on the CPU, packed once at load. The plain layout is freed in `after_load`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("cpu"))

    def after_load(self) -> None:
        """Pack the weight and free the plain layout."""
        self.weight = pack(self.weight)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, accumulated in float32."""
        x = dense(x)
        if x.shape[0] == 1 and self.dtype is torch.float32:
            # A single row would be summed in another order than the same row in a batch.
            return packed_linear(x.expand(2, -1).contiguous(), self.weight, bias)[:1]
        return packed_linear(x, self.weight, bias)
