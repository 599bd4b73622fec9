"""Products of FP8 codes in plain torch, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.common.quantized import BLOCK, QuantizedActivation


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [N, K]: value = code * scale.

    Attributes:
        codes: [N, K] float8_e4m3fn, contiguous, K a multiple of 16.
        scales: float32, contiguous. [N]: one per output feature (a scale of the whole tensor is repeated).
             [N, ceil(K / 128)] or [ceil(N / 128), ceil(K / 128)]: one per 128 inputs of 1 or of 128 features.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def blocks(self) -> bool:
        """True if scales differ along the inputs; such a weight multiplies activations of the format fp8_block."""
        return self.scales.dim() == 2

    @property
    def rows_per_scale(self) -> int:
        """Number of output features that share a scale: 128 or 1."""
        return 1 if self.scales.shape[0] == self.codes.shape[0] else BLOCK


def check(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Check the shapes, types and layout of an Fp8Weight.

    Raises:
        ValueError: One of them is wrong.
    """
    if codes.dim() != 2 or codes.dtype is not torch.float8_e4m3fn or not codes.is_contiguous():
        raise ValueError(f"FP8 codes are a contiguous matrix of float8_e4m3fn, not {codes.dtype} {list(codes.shape)}")
    rows, width = codes.shape
    if width % 16:
        raise ValueError(f"an FP8 weight has a multiple of 16 inputs, not {width}")
    inner = -(-width // BLOCK)
    allowed = [(rows,), (rows, inner), (-(-rows // BLOCK), inner)]
    if tuple(scales.shape) not in allowed or scales.dtype is not torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales of an FP8 weight {rows} x {width} are float32 of one of the shapes {allowed}")


def weight_values(weight: Fp8Weight) -> torch.Tensor:
    """Return the values, [N, K] float64."""
    rows, width = weight.codes.shape
    scales = weight.scales.double()
    if not weight.blocks:
        return weight.codes.double() * scales[:, None]
    scales = scales.repeat_interleave(weight.rows_per_scale, dim=0)[:rows]
    return weight.codes.double() * scales.repeat_interleave(BLOCK, dim=1)[:, :width]


def linear_fp8(x: QuantizedActivation, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply [T, K] codes by [N, K] codes -> [T, N] of x.dtype.

    Args:
        x: Activations of the format fp8_tensor or fp8_token; fp8_block if the weight's scales are blocks.
        weight: The weight.
        bias: [N], or None.
    """
    width = x.codes.shape[1]
    scales = x.scales.double()
    if weight.blocks:
        scales = scales.repeat_interleave(BLOCK, dim=1)[:, :width]
    out = (x.codes.double() * scales) @ weight_values(weight).T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)
