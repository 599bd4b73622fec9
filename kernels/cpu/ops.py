"""The CPU's ops: its own kernels where they cover dtypes and shapes, else the reference."""

from __future__ import annotations

from typing import Any

import torch

from kernels.activation import cpu as activation_cpu
from kernels.activation import reference as activation_reference
from kernels.activation.reference import Activation
from kernels.attention import cpu as attention_cpu
from kernels.attention import reference as attention_reference
from kernels.attention.cpu import PagedAttention, PreparedAttention
from kernels.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.norm import cpu as norm_cpu
from kernels.norm import reference as norm_reference


class CpuOps:
    """See kernels.dispatch.Ops. Kernels are compiled, or read from numba's cache, at their first use."""

    def __init__(self) -> None:
        self._norms: dict[tuple[int, torch.dtype], norm_cpu.AddRMSNorm] = {}
        self._activations: dict[tuple[int, torch.dtype], activation_cpu.SiluAndMul] = {}
        self._attentions: dict[tuple[AttentionGeometry, torch.dtype, torch.dtype], PagedAttention] = {}

    def add_rms_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """kernels/norm."""
        hidden = residual.shape[-1]
        norm = self._norms.get((hidden, dtype))
        if norm is None:
            if not norm_cpu.supported(hidden, dtype):
                return norm_reference.add_rms_norm(delta, residual, weight, eps, dtype)
            norm = self._norms[hidden, dtype] = norm_cpu.AddRMSNorm(hidden, dtype)
        return norm(delta, residual, weight, eps)

    def activation_and_mul(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """kernels/activation."""
        width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
        if not activation_cpu.supported(width, dtype, activation):
            return activation_reference.activation_and_mul(gate_up, activation)
        op = self._activations.get((width, dtype))
        if op is None:
            op = self._activations[width, dtype] = activation_cpu.SiluAndMul(width, dtype)
        return op(gate_up)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """Cuts the step into tiles."""
        return PreparedAttention(inputs, geometry, attention_cpu.make_tiles(inputs))

    def paged_attention(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: Any
    ) -> torch.Tensor:
        """kernels/attention."""
        geometry = prepared.geometry
        attention = self._attentions.get((geometry, qkv.dtype, keys.dtype))
        if attention is None:
            if not attention_cpu.supported(geometry, qkv.dtype, keys.dtype):
                return attention_reference.paged_attention(qkv, keys, values, prepared.inputs, geometry)
            attention = PagedAttention(geometry, qkv.dtype, keys.dtype)
            self._attentions[geometry, qkv.dtype, keys.dtype] = attention
        return attention(qkv, keys, values, prepared)
