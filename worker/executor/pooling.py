"""Sums of hidden states, for embeddings: on the device, so that one vector for each request comes to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.plan import StepPlan


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """Tokens of one row whose hidden states are summed up: `count` of the step's tokens from `offset` on."""

    row: int
    offset: int
    count: int


def pooled_tokens(plan: StepPlan) -> list[PooledTokens]:
    """Those of a plan, in its order."""
    pooled = []
    end = 0
    for item in plan.scheduled:
        end += item.count
        if item.num_pooled:
            pooled.append(PooledTokens(item.row, end - item.num_pooled, item.num_pooled))
    return pooled


def pool(hidden: torch.Tensor, pooled: Sequence[PooledTokens]) -> torch.Tensor | None:
    """Enqueues the sums; None where there are none.

    Args:
        hidden: [P, hidden], the states of all these tokens one after the other.

    Returns:
        [len(pooled), hidden] float64: a sum that is rounded to float32 afterwards does not show its order.
    """
    if not pooled:
        return None
    if len(pooled) == len(hidden):
        return hidden.double()
    parts = hidden.split([one.count for one in pooled])
    return torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts])
