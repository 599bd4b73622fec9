"""Which implementation of each op a device gets: the one place that knows.

Every op has one signature. The reference runs anywhere; the CPU has kernels of its own where its dtypes and shapes
are covered, GPUs have Triton's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.activation import reference as activation_reference
from kernels.ops.activation.reference import Activation
from kernels.ops.attention import reference as attention_reference
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.embedding import reference as embedding_reference
from kernels.ops.norm import reference as norm_reference


class Ops(Protocol):
    """The ops of a decoder that are not linear; see the reference of each for shapes."""

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, scale: float | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """kernels/ops/embedding."""
        ...

    def add_rms_norm(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        quantization: ActivationQuantization | None = None,
    ) -> Activations:
        """kernels/ops/norm."""
        ...

    def activation_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
    ) -> Activations:
        """kernels/ops/activation."""
        ...

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """Once per step and KV group: what `paged_attention` needs of the inputs."""
        ...

    def paged_attention(self, qkv: torch.Tensor, pages: KVPages, prepared: Any, layer: LayerConstants) -> torch.Tensor:
        """kernels/ops/attention."""
        ...


class ReferenceOps:
    """Plain torch, on any device."""

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, scale: float | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """kernels/ops/embedding/reference.py."""
        return embedding_reference.embed(token_ids, weight, scale, dtype)

    def add_rms_norm(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        quantization: ActivationQuantization | None = None,
    ) -> Activations:
        """kernels/ops/norm/reference.py."""
        return norm_reference.add_rms_norm(delta, residual, weight, eps, dtype, quantization)

    def activation_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
    ) -> Activations:
        """kernels/ops/activation/reference.py."""
        return activation_reference.activation_and_mul(gate_up, activation, quantization)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """The inputs as they are."""
        return inputs, geometry

    def paged_attention(self, qkv: torch.Tensor, pages: KVPages, prepared: Any, layer: LayerConstants) -> torch.Tensor:
        """kernels/ops/attention/reference.py."""
        inputs, geometry = prepared
        return attention_reference.paged_attention(qkv, pages, inputs, geometry, layer)


def select_ops(device: torch.device, *, deterministic: bool = False) -> Ops:
    """The ops of a device.

    Args:
        deterministic: a token's result may not depend on the batch or on how its request is cut into chunks.
    """
    # Both take their time to import, and a machine may have only one of them.
    if device.type == "cpu":
        from kernels.backends.cpu import CpuOps

        return CpuOps(deterministic=deterministic)
    if device.type == "cuda":
        from kernels.backends.gpu import TritonOps

        return TritonOps(device, deterministic)
    return ReferenceOps()
