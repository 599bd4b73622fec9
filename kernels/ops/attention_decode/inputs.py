"""Scratch memory for the partial results of decode attention, shared by all layers of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results; row i of each tensor belongs to one query token and one range of keys (AttentionWork.partials).

    Attributes:
        sums: [rows, num_heads, head_dim] float32, sum of exp2(score - maximum) * value.
        maxima: [rows, num_heads] float32, largest score in units of log2; -inf for a range without visible keys.
        weights: [rows, num_heads] float32, sum of exp2(score - maximum).
    """

    sums: torch.Tensor
    maxima: torch.Tensor
    weights: torch.Tensor


def make_scratch(rows: int, num_heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
    """Return uninitialized scratch with `rows` rows. The kernels read only rows that the work list refers to."""
    return DecodeScratch(
        sums=torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty((rows, num_heads), dtype=torch.float32, device=device),
        weights=torch.empty((rows, num_heads), dtype=torch.float32, device=device),
    )
