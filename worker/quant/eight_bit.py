"""FP8 and int8 weights on a GPU, multiplied by activations that are quantized on input.

Triton is imported when a scheme is created, because a CPU runs without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.common.quantized import BLOCK, ActivationQuantization, Activations, QuantizedActivation
from kernels.ops.linear_fp8 import reference as fp8_reference
from kernels.ops.linear_int8 import reference as int8_reference
from worker.quant.raw_weight import CodeFormat, RawWeight

DTYPES = (torch.bfloat16, torch.float16)
"""Supported dtypes of activations. Float32 activations need more precision than 8 bits have."""


class _EightBitScheme:
    """Codes of 8 bits with one scale, or one per block of 128 inputs, for each output feature."""

    _code_dtype: torch.dtype

    def __init__(self, dtype: torch.dtype, device: torch.device, *, blocks: bool = False) -> None:
        from kernels.ops.quantize.triton import quantize

        self.input_quantization: ActivationQuantization | None = None
        self.dtype = dtype
        self._device = device
        self._blocks = blocks
        self._codes = self._scales = torch.empty(0)
        self._quantize = quantize

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate codes, and a scale for each feature or for each block of a feature, on the device."""
        self._codes = torch.zeros((out_features, in_features), dtype=self._code_dtype, device=self._device)
        num_scales = -(-in_features // BLOCK) if self._blocks else 1
        self._scales = torch.zeros((out_features, num_scales), device=self._device)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Copy codes, and scales expanded over the features that share one."""
        count = raw.shape[0]
        scales = raw.extra["scale"].by_row(slice(0, count)).expand(count, -1)
        # Indexing is not supported for FP8 everywhere.
        codes = raw.data.view(torch.uint8)
        if order is not None:
            codes, scales = codes[order], scales[order]
        self._codes.view(torch.uint8)[start : start + count] = codes.to(self._device)
        self._scales[start : start + count] = scales.to(self._device)

    def _quantized(self, x: Activations) -> QuantizedActivation:
        """Return the codes of activations. Those that are not codes yet are quantized."""
        if not isinstance(x, torch.Tensor):
            return x
        if self.input_quantization is None:
            raise RuntimeError("the quantization of activations is known after after_load")
        return self._quantize(x, self.input_quantization)


class Fp8Scheme(_EightBitScheme):
    """Weights of e4m3fn codes with a scale per tensor, per output feature, or per block of 128 inputs.

    Args:
        dtype: Dtype of the layer's result.
        device: Device of the weights.
        raws: Parts that will be loaded, all scaled in the same way.
        fixed: The result of a row does not depend on the batch.
    """

    _code_dtype = torch.float8_e4m3fn

    weight: fp8_reference.Fp8Weight
    """Weight for the kernel, available after `after_load`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, raws: Sequence[RawWeight], fixed: bool) -> None:
        from kernels.ops.linear_fp8.triton import linear_fp8

        super().__init__(dtype, device, blocks=_in_blocks(raws[0]))
        self._fixed = fixed
        self._input_scales: list[float] = []
        self._linear = linear_fp8

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Return True if a layer of these parts can be kept in FP8; otherwise it is dense."""
        if not _are_codes(dtype, raws, "fp8") or len({_in_blocks(raw) for raw in raws}) > 1:
            return False
        return all(raw.extra["scale"].cols in (0, raw.shape[1], BLOCK) for raw in raws)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Copy codes and scales, and note the scale of activations if the checkpoint fixes it."""
        super().load_rows(start, raw, order)
        if "input_scale" in raw.extra:
            self._input_scales.append(float(raw.extra["input_scale"].values.max()))

    def after_load(self) -> None:
        """Merge equal scales of 128 features, and choose the quantization of activations."""
        scales = self._scales
        if self._blocks:
            firsts = scales[::BLOCK]
            if torch.equal(firsts.repeat_interleave(BLOCK, dim=0)[: scales.shape[0]], scales):
                scales = firsts
            self.input_quantization = ActivationQuantization("fp8_block")
        else:
            scales = scales[:, 0]
            self.input_quantization = ActivationQuantization("fp8_token")
            if self._input_scales:
                # Parts that share their input were calibrated on the same one; the largest scale clips none of them.
                fixed = torch.full((1, 1), max(self._input_scales), device=self._device)
                self.input_quantization = ActivationQuantization("fp8_tensor", fixed)
        scales = scales.contiguous()
        fp8_reference.check(self._codes, scales)
        self.weight = fp8_reference.Fp8Weight(self._codes, scales)
        self._codes = self._scales = torch.empty(0)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias; activations that are not codes are quantized first."""
        return self._linear(self._quantized(x), self.weight, bias, invariant=self._fixed)


class Int8Scheme(_EightBitScheme):
    """Weights of int8 codes with a scale per output feature. Sums are exact, so no row depends on the batch."""

    _code_dtype = torch.int8

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        from kernels.ops.linear_int8.triton import linear_int8

        super().__init__(dtype, device)
        self.input_quantization = ActivationQuantization("int8_token")
        self._linear = linear_int8

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Return True if a layer of these parts can be kept in int8; otherwise it is dense."""
        if not _are_codes(dtype, raws, "int8") or raws[0].shape[1] > int8_reference.MAX_INPUTS:
            return False
        return not any(_in_blocks(raw) for raw in raws)

    def after_load(self) -> None:
        """Validate the codes for the kernel once; they keep their layout."""
        self._scales = self._scales[:, 0].contiguous()
        int8_reference.check(self._codes, self._scales)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias; activations that are not codes are quantized first."""
        return self._linear(self._quantized(x), self._codes, self._scales, bias)


def _are_codes(dtype: torch.dtype, raws: Sequence[RawWeight], code_format: CodeFormat) -> bool:
    """Return True if all parts are symmetric codes of this format, with inputs that the kernels support."""
    if dtype not in DTYPES or not raws or raws[0].shape[1] % 16:
        return False
    return all(raw.format == code_format and raw.columns is None and "minimum" not in raw.extra for raw in raws)


def _in_blocks(raw: RawWeight) -> bool:
    """Return True if a row has several scales."""
    return raw.extra["scale"].cols not in (0, raw.shape[1])
