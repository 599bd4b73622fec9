"""Weights on the CPU in panels that keep the file's precision: 4 or 8 bits of GGUF's formats, else bfloat16.

A step of one request reads every weight for one row, so reading determines its time; the products determine a
prompt's. One layout serves both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.common.cpu.simd import WIDTH
from kernels.common.quantized import ActivationQuantization, Activations, dense
from kernels.ops.linear_panels.cpu import Result, panel_linear, supported
from kernels.ops.linear_panels.layout import PanelWeight, pack_codes, pack_values
from worker.quant.gguf_formats import BLOCK, split_blocks, unpacked
from worker.quant.raw_weight import RawWeight

_BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 8, "q5_1": 8, "q8_0": 8}
_WITH_MINIMUM = ("q4_1", "q5_1")


def kind_of(raws: Sequence[RawWeight]) -> tuple[int, bool]:
    """Return the bits, and whether blocks have minimums, of a layer of these parts: those of the widest part."""
    bits = max(_BITS.get(raw.format, 16) for raw in raws)
    return bits, bits < 16 and any(raw.format in _WITH_MINIMUM for raw in raws)


class PanelScheme:
    """Weights in panels, for bfloat16 activations.

    Args:
        raws: Parts that will be loaded; the layer has the bits of the widest.
        result: BFLOAT16, or FLOAT32 for results that are not rounded.
        fixed: The sums of a row are the same in every batch.
    """

    weight: PanelWeight
    """Weight for the kernel, available after `after_load`."""

    def __init__(self, raws: Sequence[RawWeight], *, result: Result = Result.BFLOAT16, fixed: bool = False) -> None:
        self.input_quantization: ActivationQuantization | None = None
        self._bits, self._minimum = kind_of(raws)
        self._result = result
        self._fixed = fixed
        self._codes = self._scales = self._minimums = torch.empty(0)

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Return True if this processor supports a layer of these parts."""
        return dtype is torch.bfloat16 and len(raws) > 0 and all(supported(raw.shape[1]) for raw in raws)

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate codes and factors, which are freed in `after_load`."""
        blocks = (out_features, in_features // BLOCK)
        if self._bits == 16:
            self._codes = torch.empty((out_features, in_features), dtype=torch.bfloat16)
            return
        if self._bits == 4:
            self._codes = torch.empty((*blocks, BLOCK // 2), dtype=torch.uint8)
        else:
            self._codes = torch.empty((*blocks, BLOCK), dtype=torch.int8)
        self._scales = torch.empty(blocks, dtype=torch.float16)
        self._minimums = torch.empty(blocks if self._minimum else 0, dtype=torch.float16)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Split output features into codes and factors."""
        rows = slice(start, start + raw.shape[0])
        if self._bits == 16:
            values = raw.dequantize(torch.bfloat16)
            self._codes[rows] = values if order is None else values[order]
            return
        raw = raw.take_rows(order)
        blocks = split_blocks(raw.format, raw.data)
        self._scales[rows] = blocks.scales
        if self._bits == 4:
            self._codes[rows] = blocks.codes
            # Without minimums the product itself subtracts 8 from the codes.
            offset = blocks.zero_point
        else:
            codes = unpacked(blocks)
            self._codes[rows] = codes if codes.dtype is torch.int8 else codes.to(torch.int8) - blocks.zero_point
            offset = 0
        if self._minimum:
            minimums = blocks.minimums
            self._minimums[rows] = blocks.scales * -offset if minimums is None else minimums

    def after_load(self) -> None:
        """Pack the weight and free the loaded codes."""
        if self._bits == 16:
            self.weight = pack_values(self._codes)
        else:
            self.weight = pack_codes(self._codes, self._scales, self._minimums if self._minimum else None)
        self._codes = self._scales = self._minimums = torch.empty(0)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, accumulated in float32."""
        if bias is not None and bias.shape[0] % WIDTH:
            bias = torch.nn.functional.pad(bias, (0, -bias.shape[0] % WIDTH))
        linear = panel_linear(*self.weight.kind, self._result)
        return linear(dense(x).contiguous(), self.weight, bias, fixed=self._fixed)
