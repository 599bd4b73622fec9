"""Routing to experts, and their linear layers, in plain torch."""

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


def route(router_logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token: the top_k largest of softmax(logits), in descending order.

    Equal values are ordered by expert id.

    Args:
        router_logits: [T, E].
        top_k: Number of experts of a token.
        renormalize: Divide the weights of a token by their sum.

    Returns:
        Expert ids [T, top_k] int32 and weights [T, top_k] float32.
    """
    probabilities = router_logits.float().softmax(dim=-1)
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.to(torch.int32), weights


def order_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sort [T, top_k] expert ids; ids outside 0..num_experts - 1 (other ranks' experts, padding) are omitted."""
    flat = expert_ids.flatten().long()
    mine = (flat >= 0) & (flat < num_experts)
    keys = torch.where(mine, flat, num_experts)
    slots = keys.argsort(stable=True).to(torch.int32)
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    offsets[1:] = counts.cumsum(0)
    return ExpertOrder(slots, offsets, expert_ids.shape[1])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: ExpertOrder,
    slot_weights: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute out[slot] = (x of the slot @ weight of its expert .T + bias) * slot_weights[slot] for each slot.

    Args:
        x: [T, K], one row per token; or [T * top_k, K], one row per slot.
        weight: [E, N, K].
        bias: [E, N] or None.
        order: Slots sorted by expert.
        slot_weights: [T * top_k] float32, or None.
        out: [T * top_k, N]; rows of slots without an expert are not changed.
    """
    num_slots = order.slots.shape[0]
    divisor = num_slots // x.shape[0] if x.shape[0] else 1
    offsets = order.offsets.tolist()
    for expert in range(order.num_experts):
        slots = order.slots[offsets[expert] : offsets[expert + 1]].long()
        values = x[slots // divisor].double() @ weight[expert].double().T
        if bias is not None:
            values = values + bias[expert].double()
        if slot_weights is not None:
            values = values * slot_weights[slots].double()[:, None]
        out[slots] = values.to(out.dtype)
    return out
