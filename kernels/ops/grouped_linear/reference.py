"""Routing to experts and their linear layers, in plain torch."""

from __future__ import annotations

import torch

from kernels.ops.grouped_linear.inputs import ExpertOrder


def route(router_logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token: the top_k largest of softmax(logits), the largest first, equal ones by lower id.

    Args:
        router_logits: [T, E].
        renormalize: the weights of a token are divided by their sum.

    Returns:
        expert ids [T, top_k] int32 and weights [T, top_k] float32.
    """
    probabilities = router_logits.float().softmax(dim=-1)
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.to(torch.int32), weights


def order_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sorts [T, top_k] expert ids. An id outside of 0..num_experts - 1 (another rank's expert, padding) is left out."""
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
    """out[slot] = (x of the slot @ weight of its expert .T + bias) * slot_weights[slot], for each slot of `order`.

    Args:
        x: [T, K], a row a token; or [T * top_k, K], a row a slot.
        weight: [E, N, K]; bias: [E, N] or None.
        slot_weights: [T * top_k] float32, or None.
        out: [T * top_k, N]; rows of slots that no expert has stay as they are.
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
