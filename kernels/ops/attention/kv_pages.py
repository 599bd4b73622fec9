"""Pages of the KV cache of one layer and the formats of their cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KVFormat = Literal["dense", "fp8", "int8", "int4"]

LARGEST: dict[KVFormat, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""Largest magnitude of a code. The scale of a cell is its largest magnitude divided by this."""


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of one layer.

    A cell is the key or value of one head of one token. Each quantized cell has one scale: value = code * scale. An
    int4 byte holds two codes, each plus 8: byte d holds dimension d in its low half and dimension d + head_dim / 2 in
    its high half, so that a kernel processes the two halves of a head without shuffling.

    The CPU may store dense bfloat16 cells in pairs (see `stored_in_pairs`), as required by its dot-product
    instruction: two adjacent dimensions of a key, or the same dimension of the values of two adjacent slots, are
    adjacent in memory.

    Attributes:
        keys: [pages, num_kv_heads, page_size, head_dim], any strides: the model's dtype or float32 (dense),
            float8_e4m3fn, int8, or uint8 with head_dim / 2 (int4). In pairs, contiguous: [pages, num_kv_heads,
            head_dim / 2, page_size, 2].
        values: Likewise; in pairs [pages, num_kv_heads, page_size / 2, head_dim, 2].
        key_scales: [pages, num_kv_heads, page_size] float32; None for dense.
        value_scales: Likewise.
        format: Format of the cells.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    format: KVFormat = "dense"

    @property
    def paired(self) -> bool:
        """True if cells are stored in pairs."""
        return self.keys.dim() == 5


def stored_in_pairs(dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Return True if this processor stores dense cells in pairs.

    It does if it has the AVX512-BF16 instruction and the sizes are even.
    """
    if dtype is not torch.bfloat16 or head_dim % 2 or page_size % 2:
        return False
    from kernels.common.cpu.bf16 import supported  # imports numba, which only the CPU kernels need

    return supported()


def key_cells(pairs: torch.Tensor) -> torch.Tensor:
    """Convert keys in pairs [..., head_dim / 2, page_size, 2] to a copy as cells [..., page_size, head_dim]."""
    return pairs.transpose(-2, -3).flatten(-2)


def value_cells(pairs: torch.Tensor) -> torch.Tensor:
    """Convert values in pairs [..., page_size / 2, head_dim, 2] to a copy as cells [..., page_size, head_dim]."""
    return pairs.transpose(-1, -2).flatten(-3, -2)


def pair_keys(cells: torch.Tensor) -> torch.Tensor:
    """Convert keys from cells to contiguous pairs; the inverse of `key_cells`."""
    pairs: torch.Tensor = cells.unflatten(-1, (-1, 2))
    return pairs.transpose(-2, -3).contiguous()


def pair_values(cells: torch.Tensor) -> torch.Tensor:
    """Convert values from cells to contiguous pairs; the inverse of `value_cells`."""
    pairs: torch.Tensor = cells.unflatten(-2, (-1, 2))
    return pairs.transpose(-1, -2).contiguous()


def quantize_cells(cells: torch.Tensor, kv_format: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., head_dim] floats to the codes stored in KVPages and [...] float32 scales.

    A cell of zeros has scale 0.
    """
    wide = cells.float()
    largest = wide.abs().amax(dim=-1)
    # Divide by a tensor: on a GPU, torch divides by a number by multiplying with its reciprocal, which rounds once
    # more.
    scales = largest / torch.full_like(largest, LARGEST[kv_format])
    scaled = wide / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    if kv_format == "fp8":
        return scaled.to(torch.float8_e4m3fn), scales
    codes = scaled.round()
    if kv_format == "int8":
        return codes.to(torch.int8), scales
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scales


def dequantize_cells(codes: torch.Tensor, scales: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
    """Return the float32 values of codes and scales from `quantize_cells`."""
    if kv_format == "int4":
        codes = torch.cat((codes & 15, codes >> 4), dim=-1).to(torch.float32) - 8
    return codes.float() * scales.unsqueeze(-1)
