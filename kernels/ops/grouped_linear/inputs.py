"""The assignment of tokens to experts, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Expert choices of a step's tokens, sorted by expert; slot t * top_k + j is choice j of token t.

    Attributes:
        slots: [T * top_k] int32, ascending within an expert; elements from offsets[-1] on are undefined.
        offsets: [E + 1] int32: expert e has slots[offsets[e] : offsets[e + 1]].
        top_k: Number of choices of a token.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.offsets.shape[0] - 1
