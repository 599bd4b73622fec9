"""Scratch for partial results of decoding, shared by every layer of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Row i of all three is the partial result of one query token over one range of keys (see AttentionWork.partials).

    Attributes:
        sums: [rows, num_heads, head_dim] float32, sum of exp2(score - maximum) * value.
        maxima: [rows, num_heads] float32, largest score in units of log2; -inf where no key was seen.
        weights: [rows, num_heads] float32, sum of exp2(score - maximum).
    """

    sums: torch.Tensor
    maxima: torch.Tensor
    weights: torch.Tensor


def make_scratch(rows: int, num_heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
    """Scratch of `rows` rows, uninitialized: what a work list does not point at is never read."""
    return DecodeScratch(
        sums=torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty((rows, num_heads), dtype=torch.float32, device=device),
        weights=torch.empty((rows, num_heads), dtype=torch.float32, device=device),
    )
