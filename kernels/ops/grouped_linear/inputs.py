"""Which tokens go to which expert, sorted."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The choices of a step's tokens by expert; slot t * top_k + j is choice j of token t.

    Attributes:
        slots: [T * top_k] int32, ascending within an expert; what lies beyond offsets[-1] means nothing.
        offsets: [E + 1] int32: expert e has slots[offsets[e] : offsets[e + 1]].
        top_k: choices of a token.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1
