"""The ops of a GPU: every one is a Triton kernel."""

from __future__ import annotations

from typing import Any

import torch

from kernels.backends.gpu_attention import TritonAttention
from kernels.backends.reference import DecoderOps
from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.activation import triton as activation_triton
from kernels.ops.activation.reference import Activation
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.embedding import triton as embedding
from kernels.ops.norm import triton as norm


class TritonOps(DecoderOps):
    """See kernels.backends.select.Ops. In the interpreter the same kernels run on tensors of the CPU.

    Args:
        deterministic: a row's result may not depend on the batch. Only attention has another way for it: the other
            kernels work row by row, always in the same order.
    """

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        self._attention = TritonAttention(device, deterministic=deterministic)

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, scale: float | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """kernels/ops/embedding."""
        return embedding.embed(token_ids, weight, scale, dtype)

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
        return norm.add_rms_norm(delta, residual, weight, eps, dtype, quantization)

    def activation_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
    ) -> Activations:
        """kernels/ops/activation."""
        return activation_triton.activation_and_mul(gate_up, activation, quantization)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """The inputs and, once a layer has asked for it, the work list."""
        return self._attention.prepare(inputs, geometry)

    def paged_attention(self, qkv: torch.Tensor, pages: KVPages, prepared: Any, layer: LayerConstants) -> torch.Tensor:
        """kernels/ops/rope_kv, kernels/ops/attention_decode and kernels/ops/attention_prefill."""
        return self._attention.run(qkv, pages, prepared, layer)
