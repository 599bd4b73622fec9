"""Layout of weights for the CPU products: panels of 16 output features, blocks of 32 inputs.

A panel is `[blocks]` of one contiguous piece: the weights of 16 features for 32 inputs, then their 16 scales, then
their 16 minimums. Inputs are grouped in pairs, as the instruction requires: two adjacent inputs of feature f are lanes
2 f and 2 f + 1, so a pair of inputs is one vector of 32 lanes. At 16 bits this vector is stored; at 8 bits a lane is a
signed byte; at 4 bits a vector of 16-bit words holds four vectors, the first in the lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.common.cpu.simd import WIDTH
from kernels.ops.linear_panels.micro import BLOCK, block_bytes, code_bytes

_PAIRS = BLOCK // 2


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight [out, in].

    At 4 and 8 bits value = code * scale + minimum. Codes are signed, except for 0 to 15 at 4 bits with minimums.

    Attributes:
        panels: [ceil(out / 16), in / 32, bytes] uint8. Features beyond the last are zero.
        bits: 4, 8, or 16 for bfloat16 values.
        minimum: Blocks have a minimum.
        num_out: Number of output features.
    """

    panels: torch.Tensor
    bits: int
    minimum: bool
    num_out: int

    @property
    def num_in(self) -> int:
        """Number of inputs."""
        return self.panels.shape[1] * BLOCK

    @property
    def kind(self) -> tuple[int, bool]:
        """Bits and presence of minimums, for which the kernels are compiled."""
        return self.bits, self.minimum


def pack_codes(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> PanelWeight:
    """Pack a weight of 4 or 8 bits.

    Args:
        codes: [out, in / 32, 16] uint8 for 4 bits, inputs 0..15 of a block in the low halves of its bytes and
            16..31 in
             the high halves, as in GGUF; [out, in / 32, 32] int8 for 8 bits. Without minimums, 8 is subtracted from
             4-bit codes.
        scales: [out, in / 32] float16.
        minimums: As scales, or None.
    """
    num_out, blocks = codes.shape[:2]
    bits = 4 if codes.dtype is torch.uint8 else 8
    size = code_bytes(bits)
    panels = _empty(num_out, blocks, bits, minimums is not None)
    if bits == 4:
        # The dimensions of halves from the second on: groups of 8 inputs, bytes of a word, codes of a byte, inputs of a
        # pair.
        halves = _padded(codes).view(-1, WIDTH, blocks, 2, 2, 2, 2)
        first, second = halves[..., 0, :], halves[..., 1, :]
        target = panels[..., :size].unflatten(-1, (2, 2, WIDTH, 2, 2))
        target[:, :, 0] = (first & 15 | second << 4).permute(0, 2, 3, 1, 5, 4)
        target[:, :, 1] = (first >> 4 | second & 0xF0).permute(0, 2, 3, 1, 5, 4)
    else:
        pairs = _padded(codes).view(torch.int16).view(-1, WIDTH, blocks, _PAIRS)
        panels[..., :size].view(torch.int16).unflatten(-1, (_PAIRS, WIDTH)).copy_(pairs.permute(0, 2, 3, 1))
    factors = panels[..., size:].view(torch.float16).unflatten(-1, (-1, WIDTH))
    factors[:, :, 0] = _padded(scales).view(-1, WIDTH, blocks).transpose(1, 2)
    if minimums is not None:
        factors[:, :, 1] = _padded(minimums).view(-1, WIDTH, blocks).transpose(1, 2)
    return PanelWeight(panels, bits, minimums is not None, num_out)


def pack_values(values: torch.Tensor) -> PanelWeight:
    """Pack a weight of bfloat16 values [out, in]."""
    num_out, num_in = values.shape
    blocks = num_in // BLOCK
    panels = _empty(num_out, blocks, 16, False)
    pairs = _padded(values.contiguous()).view(torch.int32).view(-1, WIDTH, blocks, _PAIRS)
    panels.view(torch.int32).unflatten(-1, (_PAIRS, WIDTH)).copy_(pairs.permute(0, 2, 3, 1))
    return PanelWeight(panels, 16, False, num_out)


def _empty(num_out: int, blocks: int, bits: int, minimum: bool) -> torch.Tensor:
    return torch.empty((-(-num_out // WIDTH), blocks, block_bytes(bits, minimum)), dtype=torch.uint8)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[0] % WIDTH
    if missing:
        rows = torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))
    return rows.contiguous()
