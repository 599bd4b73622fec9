"""Decoder layers in plain torch, in float64; see README.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.ops.attention import reference as attention
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.decoder_layers.inputs import LayerWeights, Linear
from kernels.ops.linear_panels.reference import linear as multiply_panels


def multiply(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Return x @ weight.T + bias."""
    return multiply_panels(x, linear.weight, linear.bias)


def layers(
    residual: torch.Tensor,
    weights: Sequence[LayerWeights],
    pages: Sequence[KVPages],
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    eps: float,
) -> torch.Tensor:
    """Add all layers to a [T, hidden] float64 residual and return it; write keys and values."""
    for layer, cells in zip(weights, pages):
        qkv = multiply(_norm(residual, layer.attention_norm, eps), layer.qkv)
        attended = attention.paged_attention(qkv, cells, inputs, geometry, LayerConstants(), torch.float64)
        residual = residual + multiply(attended, layer.output)
        gate, up = multiply(_norm(residual, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
        residual = residual + multiply(torch.nn.functional.silu(gate) * up, layer.down)
    return residual


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()
