"""What the op reads of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.linear_panels.layout import PanelWeight


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight in panels and its bias, [out] bfloat16 or None."""

    weight: PanelWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv: query, key and value heads, one after the other; gate_up: both halves.

    Attributes:
        attention_norm, mlp_norm: [hidden] float32.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In the order in which a step multiplies by them."""
        return self.qkv, self.output, self.gate_up, self.down


def uniform(layers: list[LayerWeights]) -> bool:
    """Whether one kernel serves them all: the same bits, and minimums in all or in none."""
    kinds = {one.weight.kind for layer in layers for one in layer.linears}
    return len(kinds) == 1
