"""Products with weights in panels, in float64 from the packed bytes."""

from __future__ import annotations

import torch

from kernels.common.cpu.simd import WIDTH
from kernels.ops.linear_panels.layout import PanelWeight
from kernels.ops.linear_panels.micro import BLOCK, code_bytes


def codes(weight: PanelWeight) -> torch.Tensor:
    """Return [out, in] float64: codes as they enter the product, or the values at 16 bits."""
    stored = weight.panels[..., : code_bytes(weight.bits)].contiguous()
    if weight.bits == 4:
        words = stored.view(torch.int16).long().unflatten(-1, (4, 2 * WIDTH))
        vectors = torch.stack([(words >> (4 * slot)) & 15 for slot in range(4)], dim=3).flatten(2, 3).double()
        vectors = vectors if weight.minimum else vectors - 8
    else:
        vectors = stored.view(torch.int8 if weight.bits == 8 else torch.bfloat16).unflatten(-1, (-1, 2 * WIDTH))
        vectors = vectors.double()
    lanes = vectors.unflatten(-1, (WIDTH, 2)).permute(0, 3, 1, 2, 4)  # panel, feature, block, pair, input
    found: torch.Tensor = lanes.reshape(-1, weight.num_in)[: weight.num_out]
    return found


def values(weight: PanelWeight) -> torch.Tensor:
    """Return the values, [out, in] float64."""
    result = codes(weight)
    if weight.bits == 16:
        return result
    factors = weight.panels[..., code_bytes(weight.bits) :].contiguous().view(torch.float16).unflatten(-1, (-1, WIDTH))
    by_block = factors.permute(2, 0, 3, 1).flatten(1, 2)[:, : weight.num_out].double()  # kind, feature, block
    by_input: torch.Tensor = result.unflatten(-1, (-1, BLOCK)) * by_block[0][..., None]
    if weight.minimum:
        by_input += by_block[1][..., None]
    return by_input.flatten(1)


def linear(x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute [T, in] @ [out, in].T + [out] -> [T, out] float64."""
    result = x.double() @ values(weight).T
    return result if bias is None else result + bias.double()
