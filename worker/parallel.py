"""Layout of a model over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Rank and size of the tensor-parallel group.

    Column-parallel linear layers split their outputs; row-parallel ones split their inputs and add the partial sums.
    KV heads are replicated if there are fewer than ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    group: Any = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group in place; return it unchanged if the group has one rank."""
        if self.tp_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate [..., n] of each rank to [..., n * tp_size] in rank order."""
        if self.tp_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
