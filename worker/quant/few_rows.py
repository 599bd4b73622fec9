"""Two formats of one weight on the CPU: as the file's integers for a few rows, dense and packed by oneDNN for more.

A step of one request reads every weight for one row, so its time is that of reading; a prompt's is that of the
products. Both paths have the same weights, rounded to bfloat16; what differs is the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.linear_weight_only.cpu import (
    BLOCK,
    CODE_BYTES,
    MAX_ROWS,
    CpuWeight,
    block_values,
    few_rows_linear,
    supported,
)
from kernels.quantized import ActivationQuantization, Activations, dense
from worker.quant.gguf_formats import split_blocks, unpacked
from worker.quant.onednn_packed import OneDNNPackedScheme
from worker.quant.raw_weight import RawWeight

_BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 8, "q5_1": 8, "q8_0": 8}


def kind_of(raws: Sequence[RawWeight]) -> tuple[int, bool]:
    """Bits, and whether blocks have minimums, of a layer of these parts: those of the widest.

    A format without minimums is symmetric only where its codes are signed.
    """
    return max(_BITS[raw.format] for raw in raws), any(raw.format != "q8_0" for raw in raws)


class FewRowsScheme:
    """bfloat16 activations, weights of GGUF's formats.

    Args:
        raws: the parts that will be loaded; the layer has the bits of the widest.
    """

    def __init__(self, raws: Sequence[RawWeight]) -> None:
        self.input_quantization: ActivationQuantization | None = None
        self._bits, self._has_minimum = kind_of(raws)
        self._many = OneDNNPackedScheme(torch.bfloat16)
        self._codes = self._factors = torch.empty(0)
        self._weight: CpuWeight | None = None

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Whether a layer of these parts can be kept so, on this processor."""
        return (
            dtype is torch.bfloat16
            and len(raws) > 0
            and all(raw.format in _BITS and raw.shape[1] % (2 * BLOCK) == 0 for raw in raws)
            and supported()
        )

    @property
    def weight(self) -> CpuWeight:
        """As integers. Raises RuntimeError before `after_load`."""
        if self._weight is None:
            raise RuntimeError("the weight is there after after_load")
        return self._weight

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocates codes and factors."""
        blocks = (out_features, in_features // BLOCK)
        dtype = torch.uint8 if self._bits == 4 else torch.int8
        self._codes = torch.empty((*blocks, CODE_BYTES[self._bits]), dtype=dtype)
        self._factors = torch.empty((*blocks, 2) if self._has_minimum else blocks)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Takes output features apart."""
        raw = raw.take_rows(order)
        rows = slice(start, start + raw.shape[0])
        blocks = split_blocks(raw.format, raw.data)  # type: ignore[arg-type]
        packed = blocks.codes if self._bits == 4 or raw.format == "q8_0" else unpacked(blocks)
        self._codes[rows] = packed
        if not self._has_minimum:
            self._factors[rows] = blocks.scales
            return
        self._factors[rows, :, 0] = blocks.scales
        if blocks.minimums is None:
            self._factors[rows, :, 1] = blocks.scales.float() * -blocks.zero_point
        else:
            self._factors[rows, :, 1] = blocks.minimums

    def after_load(self) -> None:
        """Writes the values for the dense format and packs them."""
        self._weight = CpuWeight(self._codes, self._factors)
        self._many.pack(block_values(self._bits, self._has_minimum)(self._weight))
        self._codes = self._factors = torch.empty(0)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias, accumulated in float32."""
        x = dense(x)
        if 0 < x.shape[0] <= MAX_ROWS:
            return few_rows_linear(self._bits, self._has_minimum)(x.contiguous(), self.weight, bias)
        return self._many.apply(x, bias)
