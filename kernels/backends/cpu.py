"""Decoder operations on the CPU.

Compiled kernels run where they support the dtypes and shapes; the reference runs otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.backends.reference import DecoderOps
from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.activation import cpu as activation_cpu
from kernels.ops.activation.reference import Activation
from kernels.ops.attention import cpu as attention_cpu
from kernels.ops.attention import reference as attention_reference
from kernels.ops.attention.cpu import PagedAttention, PreparedAttention
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.norm import cpu as norm_cpu
from shared.errors import ConfigurationError


class CpuOps(DecoderOps):
    """Decoder operations on the CPU.

    Kernels are compiled, or loaded from numba's cache, at their first use.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        """Create the operations.

        Args:
            deterministic: Raise an error for attention that the kernels do not support. The kernels themselves are
                always deterministic.
        """
        self._deterministic = deterministic
        self._norms: dict[tuple[int, torch.dtype], norm_cpu.AddRMSNorm] = {}
        self._activations: dict[tuple[int, torch.dtype], activation_cpu.SiluAndMul] = {}
        self._attentions: dict[tuple[AttentionGeometry, torch.dtype, torch.dtype, bool], PagedAttention] = {}

    def add_rms_norm(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        quantization: ActivationQuantization | None = None,
    ) -> Activations:
        """See kernels/ops/norm."""
        if quantization is not None:
            return super().add_rms_norm(delta, residual, weight, eps, dtype, quantization)
        hidden = residual.shape[-1]
        norm = self._norms.get((hidden, dtype))
        if norm is None:
            if not norm_cpu.supported(hidden, dtype):
                return super().add_rms_norm(delta, residual, weight, eps, dtype)
            norm = self._norms[hidden, dtype] = norm_cpu.AddRMSNorm(hidden, dtype)
        return norm(delta, residual, weight, eps)

    def activation_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
    ) -> Activations:
        """See kernels/ops/activation."""
        width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
        if quantization is not None or not activation_cpu.supported(width, dtype, activation):
            return super().activation_and_mul(gate_up, activation, quantization)
        op = self._activations.get((width, dtype))
        if op is None:
            op = self._activations[width, dtype] = activation_cpu.SiluAndMul(width, dtype)
        return op(gate_up)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """Cut the step into tiles."""
        return PreparedAttention(inputs, geometry, attention_cpu.make_tiles(inputs))

    def paged_attention(self, qkv: torch.Tensor, pages: KVPages, prepared: Any, layer: LayerConstants) -> torch.Tensor:
        """See kernels/ops/attention."""
        geometry = prepared.geometry
        dtype, kv_dtype, paired = qkv.dtype, pages.keys.dtype, pages.paired
        key = geometry, dtype, kv_dtype, paired
        attention = self._attentions.get(key)
        if attention is None:
            covered = (
                pages.format == "dense" and layer.sinks is None and attention_cpu.supported(geometry, dtype, kv_dtype)
            )
            if not covered and self._deterministic:
                raise ConfigurationError(
                    "--deterministic on the CPU does not support this model's kind of attention; start the worker "
                    "without it"
                )
            if not covered:
                return attention_reference.paged_attention(qkv, pages, prepared.inputs, geometry, layer)
            attention = self._attentions[key] = PagedAttention(geometry, dtype, kv_dtype, paired=paired)
        if layer.q_norm is not None and layer.k_norm is not None:
            heads = qkv.view(qkv.shape[0], -1, geometry.head_dim)
            query = heads[:, : geometry.num_heads]
            keys = heads[:, geometry.num_heads : geometry.num_heads + geometry.num_kv_heads]
            query.copy_(attention_reference.norm_heads(query.float(), layer.q_norm, layer.norm_eps))
            keys.copy_(attention_reference.norm_heads(keys.float(), layer.k_norm, layer.norm_eps))
        return attention(qkv, pages.keys, pages.values, prepared)
