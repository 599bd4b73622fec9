"""Gated activation of a feed-forward block in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.quantize.reference import quantize

Activation = Literal["silu", "gelu", "gelu_tanh"]


def activation_and_mul(
    gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
) -> Activations:
    """Compute [T, 2 * n] (gate, then up) -> [T, n] = activation(gate) * up (Shazeer 2020), in float32.

    quantization: Quantization that the next linear layer expects, or None.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case "silu":
            gate = F.silu(gate)
        case "gelu":
            gate = F.gelu(gate)
        case "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
    out = (gate * up).to(gate_up.dtype)
    return out if quantization is None else quantize(out, quantization)
