"""Layout of integer weights for the kernels: codes in blocks of 128 inputs, scales and minimums by group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
"""Inputs of a block."""
STEP = 32
"""Inputs of a slot: the kernels multiply as many at once, and no group is smaller."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights [out, in]: value = (code - 2 ** (bits - 1)) * scale + minimum.

    Attributes:
        words: 4 bits: [ceil(in / 128), out, 32] int16; nibble s of word w of a block is the code of its input 32 s
            + w.
             8 bits: [ceil(in / 128), out, 128] uint8. Codes of inputs beyond the last are undefined.
        scales: [groups, out] float16 or float32; there are groups beyond the last input, up to whole blocks.
        minimums: As scales; None if all are 0.
        bits: 4 or 8.
        group: Inputs of a group: 32, 64, a multiple of 128, or 0 for all inputs.
        num_in: Number of inputs.
        counters: [ceil(out / 64)] int32 on the same device, 0 before and after a product: finished programs of a
            tile.
    """

    words: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bits: int
    group: int
    num_in: int
    counters: torch.Tensor

    @property
    def num_out(self) -> int:
        """Number of output features."""
        return self.words.shape[1]

    @property
    def group_blocks(self) -> int:
        """Number of blocks of a group of at least one block, as the kernels count them."""
        return max(1, self.group // BLOCK) if self.group else self.words.shape[0]


def group_constant(group: int) -> int:
    """Return the constant for which kernels are compiled: 32, 64, or 128 for every group of whole blocks."""
    return group if 0 < group < BLOCK else BLOCK


def num_groups(num_in: int, group: int) -> int:
    """Return the number of rows of `scales`. Raises ValueError for groups that the kernels do not support."""
    if group == 0:
        return 1
    if group not in (32, 64) and (group < 0 or group % BLOCK):
        raise ValueError(f"groups of {group} inputs; 32, 64 and multiples of {BLOCK} are supported")
    blocks = -(-num_in // BLOCK)
    return -(-blocks * BLOCK // group)


def empty_words(num_out: int, num_in: int, bits: int, device: torch.device) -> torch.Tensor:
    """Allocate the words of a weight."""
    blocks = -(-num_in // BLOCK)
    if bits == 4:
        return torch.empty((blocks, num_out, STEP), dtype=torch.int16, device=device)
    if bits == 8:
        return torch.empty((blocks, num_out, BLOCK), dtype=torch.uint8, device=device)
    raise ValueError(f"weights of {bits} bits; 4 and 8 are supported")


def new_counters(num_out: int, device: torch.device) -> torch.Tensor:
    """Allocate PackedWeight.counters."""
    return torch.zeros(-(-num_out // 64), dtype=torch.int32, device=device)


def pack_rows(words: torch.Tensor, start: int, codes: torch.Tensor) -> None:
    """Write the codes of some output features.

    Args:
        words: See PackedWeight.
        start: First output feature.
        codes: [rows, in] uint8 on the device of `words`.
    """
    blocks = words.shape[0]
    rows, num_in = codes.shape
    padded = torch.nn.functional.pad(codes, (0, blocks * BLOCK - num_in))
    target = words[:, start : start + rows]
    if words.dtype is torch.uint8:
        target.copy_(padded.view(rows, blocks, BLOCK).transpose(0, 1))
        return
    slots = padded.view(rows, blocks, BLOCK // STEP, STEP).to(torch.int16)
    joined = slots[:, :, 0] | slots[:, :, 1] << 4 | slots[:, :, 2] << 8 | slots[:, :, 3] << 12
    target.copy_(joined.transpose(0, 1))
