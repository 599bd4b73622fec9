"""FP8 weights on a GPU, multiplied by activations that are quantized on input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.common.quantized import BLOCK, ActivationQuantization, Activations
from kernels.ops.linear_fp8.inputs import Fp8Weight, check
from worker.quant.raw_weight import RawWeight

DTYPES = (torch.bfloat16, torch.float16)
"""Supported dtypes of activations. Float32 activations need more precision than FP8 has."""


class Fp8Scheme:
    """Weights of e4m3fn codes with a scale per tensor, per output feature, or per block of 128 inputs.

    Args:
        dtype: Dtype of the layer's result.
        device: Device of the weights.
        raws: Parts that will be loaded, all scaled in the same way.
        fixed: The result of a row does not depend on the batch.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, raws: Sequence[RawWeight], fixed: bool) -> None:
        self.input_quantization: ActivationQuantization | None = None
        self.dtype = dtype
        self._device = device
        self._fixed = fixed
        self._blocks = _in_blocks(raws[0])
        self._input_scales: list[float] = []
        self._codes = self._scales = torch.empty(0)
        self._weight: Fp8Weight | None = None
        from kernels.ops.linear_fp8.triton import linear_fp8  # a CPU runs without triton
        from kernels.ops.quantize.triton import quantize

        self._linear = linear_fp8
        self._quantize = quantize

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Return True if a layer of these parts can be kept in FP8; otherwise it is dense."""
        if dtype not in DTYPES or not raws or any(raw.format != "fp8" or raw.columns is not None for raw in raws):
            return False
        width = raws[0].shape[1]
        if width % 16 or any("minimum" in raw.extra for raw in raws):
            return False
        blocks = {_in_blocks(raw) for raw in raws}
        return len(blocks) == 1 and all(raw.extra["scale"].cols in (0, width, BLOCK) for raw in raws)

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate codes, and a scale for each feature or for each block of a feature, on the device."""
        self._codes = torch.zeros((out_features, in_features), dtype=torch.float8_e4m3fn, device=self._device)
        shape = (out_features, -(-in_features // BLOCK)) if self._blocks else (out_features,)
        self._scales = torch.zeros(shape, device=self._device)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Copy codes, and scales expanded over the features that share one."""
        count = raw.shape[0]
        scales = raw.extra["scale"].by_row(slice(0, count)).expand(count, -1)
        # Indexing is not supported for FP8 everywhere.
        codes = raw.data.view(torch.uint8)
        if order is not None:
            codes, scales = codes[order], scales[order]
        self._codes.view(torch.uint8)[start : start + count] = codes.to(self._device)
        self._scales[start : start + count] = (scales if self._blocks else scales[:, 0]).to(self._device)
        if "input_scale" in raw.extra:
            self._input_scales.append(float(raw.extra["input_scale"].values.max()))

    def after_load(self) -> None:
        """Merge equal scales of 128 features, and choose the quantization of activations."""
        scales = self._scales
        if self._blocks:
            firsts = scales[::BLOCK]
            if torch.equal(firsts.repeat_interleave(BLOCK, dim=0)[: scales.shape[0]], scales):
                scales = firsts
        scales = scales.contiguous()
        check(self._codes, scales)
        self._weight = Fp8Weight(self._codes, scales)
        self._codes = self._scales = torch.empty(0)
        if self._blocks:
            self.input_quantization = ActivationQuantization("fp8_block")
        elif self._input_scales:
            # Parts that share their input were calibrated on the same one; the largest scale clips none of them.
            fixed = torch.full((1, 1), max(self._input_scales), device=self._device)
            self.input_quantization = ActivationQuantization("fp8_tensor", fixed)
        else:
            self.input_quantization = ActivationQuantization("fp8_token")

    @property
    def weight(self) -> Fp8Weight:
        """Weight for the kernel."""
        if self._weight is None:
            raise RuntimeError("weight is available after after_load")
        return self._weight

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias; activations that are not codes are quantized first."""
        weight = self.weight
        if isinstance(x, torch.Tensor):
            if self.input_quantization is None:
                raise RuntimeError("the quantization of activations is known after after_load")
            x = self._quantize(x, self.input_quantization)
        return self._linear(x, weight, bias, invariant=self._fixed)


def _in_blocks(raw: RawWeight) -> bool:
    """Return True if a row has several scales."""
    return raw.extra["scale"].cols not in (0, raw.shape[1])
