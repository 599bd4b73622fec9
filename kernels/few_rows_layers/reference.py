"""Layers of a decoder in plain torch, in float64: see README.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention import reference as attention
from kernels.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.attention.kv_pages import KVPages
from kernels.few_rows_layers.inputs import LayerWeights, Linear
from kernels.linear_weight_only.cpu import BLOCK, CpuWeight


def values(weight: CpuWeight) -> torch.Tensor:
    """[out, in] float64: code * scale + minimum, rounded to bfloat16."""
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    factors = weight.factors
    wide = codes.float()
    wide = wide * factors[..., :1] + factors[..., 1:] if weight.has_minimum else wide * factors.unsqueeze(-1)
    return wide.reshape(weight.num_out, -1, BLOCK).flatten(1).bfloat16().double()


def multiply(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x @ weight.T + bias."""
    out = x @ values(linear.weight).T
    return out if linear.bias is None else out + linear.bias.double()


def layers(
    residual: torch.Tensor,
    weights: Sequence[LayerWeights],
    pages: Sequence[KVPages],
    inputs: AttentionInputs,
    geometry: AttentionGeometry,
    eps: float,
) -> torch.Tensor:
    """[T, hidden] float64 -> the same with all layers added; writes keys and values."""
    for layer, cells in zip(weights, pages):
        qkv = multiply(_norm(residual, layer.attention_norm, eps), layer.qkv)
        attended = attention.paged_attention(qkv, cells, inputs, geometry, LayerConstants(), torch.float64)
        residual = residual + multiply(attended, layer.output)
        gate, up = multiply(_norm(residual, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
        residual = residual + multiply(torch.nn.functional.silu(gate) * up, layer.down)
    return residual


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()
