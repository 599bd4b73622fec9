"""How a model is laid out over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Rank and size of the tensor-parallel group; pipeline stages have their place, size 1 for now.

    Column-parallel linears split their outputs, row-parallel ones their inputs and add the partial sums up; KV heads
    are replicated where there are fewer than ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    group: Any = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the group, in place; the tensor itself where the group has one rank."""
        if self.tp_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank -> [..., n * tp_size] in rank order."""
        if self.tp_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
