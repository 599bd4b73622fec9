"""Quantized activations: what a norm or an activation hands to a linear layer that multiplies 8-bit operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ActivationFormat = Literal["fp8_tensor", "fp8_token", "fp8_block", "int8_token"]
"""fp8_tensor: e4m3fn, one scale that the checkpoint fixes. fp8_token, int8_token: one scale a row, largest magnitude
over 448 or 127. fp8_block: one scale for each 128 values of a row."""

BLOCK = 128


@dataclass(frozen=True, slots=True)
class ActivationQuantization:
    """How a linear layer wants its input.

    Attributes:
        format: see ActivationFormat.
        scale: [1, 1] float32 of fp8_tensor; None for the others, which find theirs.
    """

    format: ActivationFormat
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantizedActivation:
    """[T, n] activations as codes and scales.

    Attributes:
        codes: [T, n] float8_e4m3fn or int8.
        scales: float32: [T, 1] a row; [T, ceil(n / 128)] a block; [1, 1] a tensor.
        dtype: of the activations before, and of the linear layer's result.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | QuantizedActivation
"""What a linear layer multiplies."""


def dense(x: Activations) -> torch.Tensor:
    """The tensor, where nobody asked for codes."""
    if isinstance(x, QuantizedActivation):
        raise TypeError("quantized activations reached what takes them as they are")
    return x
