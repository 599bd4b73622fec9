"""Weights of a model's layers as read by the fused decoder layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.linear_panels.layout import PanelWeight


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight in panels and its bias, which is [out] bfloat16 or None."""

    weight: PanelWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. qkv: query, key and value heads, in this order; gate_up: both halves.

    Attributes:
        attention_norm: [hidden] float32.
        mlp_norm: [hidden] float32.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """Linear layers in the order in which a step uses them."""
        return self.qkv, self.output, self.gate_up, self.down


def uniform(layers: list[LayerWeights]) -> bool:
    """Return True if one kernel supports all layers: equal bits, and minimums in all layers or in none."""
    kinds = {one.weight.kind for layer in layers for one in layer.linears}
    return len(kinds) == 1
