"""Int8 weights on a GPU, multiplied by activations that are quantized row by row on input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.linear_int8.inputs import MAX_INPUTS, check
from worker.quant.raw_weight import RawWeight

DTYPES = (torch.bfloat16, torch.float16)
"""Supported dtypes of activations. Float32 activations need more precision than int8 has."""


class Int8Scheme:
    """Weights of int8 codes with a scale per output feature. Sums are exact, so no row depends on the batch.

    Args:
        dtype: Dtype of the layer's result.
        device: Device of the weights.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.input_quantization: ActivationQuantization | None = ActivationQuantization("int8_token")
        self.dtype = dtype
        self._device = device
        self._codes = self._scales = torch.empty(0)
        from kernels.ops.linear_int8.triton import linear_int8  # a CPU runs without triton
        from kernels.ops.quantize.triton import quantize

        self._linear = linear_int8
        self._quantize = quantize

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Return True if a layer of these parts can be kept in int8; otherwise it is dense."""
        if dtype not in DTYPES or not raws or any(raw.format != "int8" or raw.columns is not None for raw in raws):
            return False
        width = raws[0].shape[1]
        if width % 16 or width > MAX_INPUTS or any("minimum" in raw.extra for raw in raws):
            return False
        return all(raw.extra["scale"].cols in (0, width) for raw in raws)

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate codes, and a scale for each feature, on the device."""
        self._codes = torch.zeros((out_features, in_features), dtype=torch.int8, device=self._device)
        self._scales = torch.zeros(out_features, device=self._device)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Copy codes, and scales expanded over the features that share one."""
        count = raw.shape[0]
        scales = raw.extra["scale"].by_row(slice(0, count))[:, 0].expand(count)
        codes = raw.data
        if order is not None:
            codes, scales = codes[order], scales[order]
        self._codes[start : start + count] = codes.to(self._device)
        self._scales[start : start + count] = scales.to(self._device)

    def after_load(self) -> None:
        """Validate the codes for the kernel once; they keep their layout."""
        check(self._codes, self._scales)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias; activations that are not codes are quantized first."""
        if isinstance(x, torch.Tensor):
            x = self._quantize(x, ActivationQuantization("int8_token"))
        return self._linear(x, self._codes, self._scales, bias)
