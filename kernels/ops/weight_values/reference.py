"""The values of integer weights, in float64."""

from __future__ import annotations

import torch

from kernels.ops.weight_values.layout import BLOCK, STEP, PackedWeight


def codes(weight: PackedWeight) -> torch.Tensor:
    """Return the codes, [out, in] int64."""
    blocks, num_out = weight.words.shape[:2]
    if weight.bits == 8:
        values = weight.words.long()
    else:
        words = weight.words.long()
        values = torch.stack([(words >> (4 * slot)) % 16 for slot in range(BLOCK // STEP)], dim=2)
    return values.reshape(blocks, num_out, BLOCK).transpose(0, 1).reshape(num_out, -1)[:, : weight.num_in]


def values(weight: PackedWeight) -> torch.Tensor:
    """Return the values, [out, in] float64: (code - 2 ** (bits - 1)) * scale + minimum."""
    group = weight.group or weight.num_in
    of_input = torch.arange(weight.num_in, device=weight.words.device) // group
    result = (codes(weight) - (1 << (weight.bits - 1))) * weight.scales.double()[of_input].T
    if weight.minimums is not None:
        result += weight.minimums.double()[of_input].T
    return result


def values_of(weight: PackedWeight, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [last - first, in] values of the output features first..last, rounded once to `dtype`."""
    return values(weight)[first:last].to(dtype)
