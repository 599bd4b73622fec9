"""Attention block: projections around the paged attention operation."""

from __future__ import annotations

from typing import Any

import torch

from kernels.backends.reference import DecoderOps
from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.attention.inputs import AttentionGeometry, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.decoder_layers.inputs import Linear
from worker.model.linear import ColumnParallelLinear, Part, Placement, RowParallelLinear, split_evenly
from worker.model.loading.model_files import WeightSource
from worker.model.rope import half_split_rows
from worker.model.spec import DecoderSpec
from worker.parallel import ParallelContext


def kv_head_range(num_kv_heads: int, parallel: ParallelContext) -> slice:
    """Return the KV heads of this rank: an even share, or one head that several ranks replicate."""
    if num_kv_heads >= parallel.tp_size:
        return split_evenly(num_kv_heads, parallel)
    head = parallel.tp_rank * num_kv_heads // parallel.tp_size
    return slice(head, head + 1)


def attention_geometry(
    spec: DecoderSpec, page_size: int, window: int | None, parallel: ParallelContext
) -> AttentionGeometry:
    """Return the shapes of this rank's attention operation."""
    heads = split_evenly(spec.num_heads, parallel)
    kv_heads = kv_head_range(spec.num_kv_heads, parallel)
    return AttentionGeometry(
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        head_dim=spec.head_dim,
        rotary_dim=spec.rope.rotary_dim,
        page_size=page_size,
        scale=spec.scale,
        window=window,
    )


class Attention:
    """Attention block of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, weights: WeightSource, place: Placement, ops: DecoderOps) -> None:
        prefix = f"layers.{layer}"
        dim = spec.head_dim
        heads = split_evenly(spec.num_heads, place.parallel)
        kv_heads = kv_head_range(spec.num_kv_heads, place.parallel)
        self._ops = ops
        q_order = k_order = head_order = None
        if spec.rope.interleaved:
            q_order = half_split_rows(heads.stop - heads.start, dim, spec.rope.rotary_dim)
            k_order = half_split_rows(kv_heads.stop - kv_heads.start, dim, spec.rope.rotary_dim)
            head_order = half_split_rows(1, dim, spec.rope.rotary_dim)
        q_rows = slice(heads.start * dim, heads.stop * dim)
        kv_rows = slice(kv_heads.start * dim, kv_heads.stop * dim)
        parts = [
            Part(f"{prefix}.q", q_rows, q_order),
            Part(f"{prefix}.k", kv_rows, k_order),
            Part(f"{prefix}.v", kv_rows),
        ]
        self._qkv = ColumnParallelLinear(weights, parts, bias=spec.attention_bias, place=place)
        self._o = RowParallelLinear(weights, f"{prefix}.o", q_rows, bias=spec.attention_output_bias, place=place)
        self._constants = LayerConstants()
        if spec.qk_norm:
            norms = []
            for name in (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"):
                vector = weights.get(name).dequantize(torch.float32)
                vector = vector if head_order is None else vector[head_order]
                norms.append(vector.to(place.device))
            self._constants = LayerConstants(norms[0], norms[1], spec.norm_eps)

    @property
    def panels(self) -> tuple[Linear, Linear] | None:
        """Both projections for the operation that computes all layers at once.

        None if it does not support the block.
        """
        qkv, output = self._qkv.panels, self._o.panels
        if qkv is None or output is None or self._constants.q_norm is not None:
            return None
        return qkv, output

    @property
    def input_quantization(self) -> ActivationQuantization | None:
        """Quantization that the block expects of its input; None for none."""
        return self._qkv.input_quantization

    def __call__(self, x: Activations, pages: KVPages, prepared: Any) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]; `prepared` is the operation's state for the step."""
        return self._o(self._ops.paged_attention(self._qkv(x), pages, prepared, self._constants))
