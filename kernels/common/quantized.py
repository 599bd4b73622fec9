"""Quantized activations, which a norm or an activation passes to a linear layer that multiplies 8-bit operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ActivationFormat = Literal["fp8_tensor", "fp8_token", "fp8_block", "int8_token"]
"""fp8_tensor: e4m3fn with one scale that the checkpoint fixes. fp8_token, int8_token: one scale per row, largest
magnitude over 448 or 127. fp8_block: one scale per 128 values of a row.
"""

BLOCK = 128


@dataclass(frozen=True, slots=True)
class ActivationQuantization:
    """Quantization that a linear layer expects of its input.

    Attributes:
        format: See ActivationFormat.
        scale: [1, 1] float32 for fp8_tensor; None for the others, which compute theirs.
    """

    format: ActivationFormat
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantizedActivation:
    """[T, n] activations as codes and scales.

    Attributes:
        codes: [T, n] float8_e4m3fn or int8.
        scales: Float32: [T, 1] per row; [T, ceil(n / 128)] per block; [1, 1] per tensor.
        dtype: Dtype of the activations before, and of the linear layer's result.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | QuantizedActivation
"""Input of a linear layer."""


def dense(x: Activations) -> torch.Tensor:
    """Return the tensor of activations that were not quantized."""
    if isinstance(x, QuantizedActivation):
        raise TypeError("quantized activations reached an operation that expects unquantized ones")
    return x
