"""Weights in panels for tests and measurements."""

from __future__ import annotations

import torch

from kernels.ops.linear_panels.layout import PanelWeight, pack_codes, pack_values
from kernels.ops.linear_panels.micro import BLOCK

KINDS = [(4, True), (4, False), (8, False), (8, True), (16, False)]
SHAPES = [(1, 32), (3, 128), (17, 96), (40, 576), (960, 576), (576, 1536)]


def random_weight(
    shape: tuple[int, int], bits: int, *, minimum: bool, generator: torch.Generator | None = None
) -> PanelWeight:
    """Return a weight [out, in] that keeps the sums of normal activations near 1."""
    num_out, num_in = shape
    if bits == 16:
        return pack_values((torch.randn(shape, generator=generator) / num_in**0.5).bfloat16())
    blocks = num_out, num_in // BLOCK
    low, high, size, dtype = (0, 256, BLOCK // 2, torch.uint8) if bits == 4 else (-128, 128, BLOCK, torch.int8)
    codes = torch.randint(low, high, (*blocks, size), generator=generator).to(dtype)
    spread = (16 if bits == 4 else 256) / 3.5 * num_in**0.5
    scales = (torch.rand(blocks, generator=generator) + 0.5) / spread
    minimums = (-scales * (8 if bits == 4 else 0.5)).half() if minimum else None
    return pack_codes(codes, scales.half(), minimums)
