"""Products of int8 codes in plain torch, exact until they are scaled."""

from __future__ import annotations

import torch

from kernels.common.quantized import QuantizedActivation

MAX_INPUTS = (1 << 31) // (128 * 128)
"""Maximum number of inputs for which no sum exceeds int32."""


def check(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Check that `linear_int8` can multiply these codes and scales.

    Raises:
        ValueError: It cannot.
    """
    if codes.dim() != 2 or codes.dtype is not torch.int8 or not codes.is_contiguous():
        raise ValueError(f"int8 codes are a contiguous matrix of int8, not {codes.dtype} {list(codes.shape)}")
    rows, width = codes.shape
    if width % 16 or width > MAX_INPUTS:
        raise ValueError(f"an int8 weight has a multiple of 16 inputs, at most {MAX_INPUTS}, not {width}")
    if tuple(scales.shape) != (rows,) or scales.dtype is not torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales of an int8 weight {rows} x {width} are float32 [{rows}], not {list(scales.shape)}")


def linear_int8(
    x: QuantizedActivation, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply [T, K] int8_token activations by an int8 weight -> [T, N] of x.dtype.

    Args:
        x: The activations.
        codes: [N, K] int8.
        scales: [N] float32, one per output feature: value = code * scale.
        bias: [N], or None.
    """
    out = (x.codes.double() @ codes.double().T) * x.scales.double() * scales.double()
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)
