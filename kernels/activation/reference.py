"""The gated activation of a feed-forward block, in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["silu", "gelu", "gelu_tanh"]


def activation_and_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[T, 2 * n] (gate, then up) -> [T, n] = activation(gate) * up (Shazeer 2020), arithmetic in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case "silu":
            gate = F.silu(gate)
        case "gelu":
            gate = F.gelu(gate)
        case "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up.dtype)
