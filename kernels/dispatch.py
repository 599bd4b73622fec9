"""Which implementation of each op a device gets: the one place that knows.

Every op has one signature. The reference runs anywhere; the CPU has kernels of its own where its dtypes and shapes
are covered.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kernels.activation import reference as activation_reference
from kernels.activation.reference import Activation
from kernels.attention import reference as attention_reference
from kernels.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.norm import reference as norm_reference


class Ops(Protocol):
    """The ops of a decoder layer that are not linear; see the reference of each for shapes."""

    def add_rms_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """kernels/norm."""
        ...

    def activation_and_mul(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """kernels/activation."""
        ...

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """Once per step and KV group: what `paged_attention` needs of the inputs."""
        ...

    def paged_attention(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: Any
    ) -> torch.Tensor:
        """kernels/attention."""
        ...


class ReferenceOps:
    """Plain torch, on any device."""

    def add_rms_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """kernels/norm/reference.py."""
        return norm_reference.add_rms_norm(delta, residual, weight, eps, dtype)

    def activation_and_mul(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """kernels/activation/reference.py."""
        return activation_reference.activation_and_mul(gate_up, activation)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """The inputs as they are."""
        return inputs, geometry

    def paged_attention(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: Any
    ) -> torch.Tensor:
        """kernels/attention/reference.py."""
        inputs, geometry = prepared
        return attention_reference.paged_attention(qkv, keys, values, inputs, geometry)


def select_ops(device: torch.device) -> Ops:
    """The ops of a device."""
    if device.type == "cpu":
        from kernels.cpu.ops import CpuOps  # numba takes its time to import and other devices do without it

        return CpuOps()
    return ReferenceOps()
