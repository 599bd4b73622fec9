"""What the op reads of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear_weight_only.cpu import CpuWeight


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight of 4 or 8 bits and its bias, [out] bfloat16 or None."""

    weight: CpuWeight
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
    kinds = {(one.weight.bits, one.weight.has_minimum) for layer in layers for one in layer.linears}
    return len(kinds) == 1
