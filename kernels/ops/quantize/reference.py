"""Quantization of activations in plain torch; kernels/common/quantized.py describes the formats."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common.quantized import BLOCK, ActivationQuantization, QuantizedActivation

_LARGEST = {"fp8_tensor": 448.0, "fp8_token": 448.0, "fp8_block": 448.0, "int8_token": 127.0}


def quantize(x: torch.Tensor, quantization: ActivationQuantization) -> QuantizedActivation:
    """Convert [T, n] floats to codes and scales.

    Rows or blocks of zeros have scale 0. Values beyond the range of a fixed scale saturate.
    """
    largest = _LARGEST[quantization.format]
    rows, width = x.shape
    wide = x.float()
    if quantization.format == "fp8_block":
        blocks = F.pad(wide, (0, -width % BLOCK)).view(rows, -(-width // BLOCK), BLOCK)
        scales = _quotient(blocks.abs().amax(dim=-1), largest)
        scaled = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)).flatten(1)[:, :width]
    else:
        fixed = quantization.scale
        scales = _quotient(wide.abs().amax(dim=-1, keepdim=True), largest) if fixed is None else fixed
        scaled = wide / torch.where(scales > 0, scales, 1.0)
    scaled = scaled.clamp(-largest, largest)
    if quantization.format == "int8_token":
        return QuantizedActivation(scaled.round().to(torch.int8), scales, x.dtype)
    return QuantizedActivation(scaled.to(torch.float8_e4m3fn), scales, x.dtype)


def _quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return x / divisor, rounded once.

    On a GPU, torch divides by a number by multiplying with its rounded reciprocal.
    """
    return x / torch.full_like(x, divisor)


def dequantize(activation: QuantizedActivation) -> torch.Tensor:
    """Return the [T, n] float32 values of codes and scales."""
    scales = activation.scales
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(BLOCK, dim=1)[:, : activation.codes.shape[1]]
    return activation.codes.float() * scales
