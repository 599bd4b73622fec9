"""Decoder operations on a GPU, all of them Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.backends.reference import DecoderOps
from kernels.ops.activation import triton as activation_triton
from kernels.ops.attention.cascade import CascadeWork
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.attention_cascade.triton import attention_cascade
from kernels.ops.attention_decode.triton import attention_decode
from kernels.ops.attention_prefill.triton import attention_prefill, prefill_tile
from kernels.ops.attention_work.inputs import AttentionWork, DecodeScratch, make_scratch, make_work, max_decode_queries
from kernels.ops.attention_work.triton import build_work
from kernels.ops.embedding import triton as embedding
from kernels.ops.norm import triton as norm
from kernels.ops.rope_kv.triton import rope_kv


class TritonOps(DecoderOps):
    """Decoder operations on a GPU. In Triton's interpreter the same kernels run on CPU tensors.

    Args:
        device: Device of the tensors.
        deterministic: The result of a row must not depend on the batch. This changes attention only; the other
            kernels
            process each row alone and in a fixed order.
    """

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        self._attention = TritonAttention(device, deterministic=deterministic)

    embed = staticmethod(embedding.embed)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    activation_and_mul = staticmethod(activation_triton.activation_and_mul)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """Return the inputs, to which the first layer adds the work list."""
        return self._attention.prepare(inputs, geometry)

    def paged_attention(self, qkv: torch.Tensor, pages: KVPages, prepared: Any, layer: LayerConstants) -> torch.Tensor:
        """See kernels/ops/rope_kv, kernels/ops/attention_decode and kernels/ops/attention_prefill."""
        return self._attention.run(qkv, pages, prepared, layer)


_Key = tuple[AttentionGeometry, int]


@dataclass(slots=True)
class PreparedAttention:
    """One step of one KV group: its inputs, and the work list that the first layer builds for all layers."""

    inputs: AttentionInputs
    geometry: AttentionGeometry
    work: AttentionWork | None = None


class TritonAttention:
    """Paged attention with the buffers that all steps share.

    The buffers are the work lists of each KV group and the scratch for partial results. All steps run on one stream,
    so they can share them. A buffer is replaced when a step is larger than all steps before it. Replaced buffers are
    kept, because captured graphs still use them.

    Args:
        device: Device of the buffers.
        deterministic: The result of a token must not depend on the batch or on how its prompt is split into
            chunks. All
            queries then use the prefill kernel.
        scratch_rows: Number of partial results of decoding requests, over all heads, that the scratch holds.
            Further
            requests are computed in one piece.
    """

    def __init__(self, device: torch.device, *, deterministic: bool = False, scratch_rows: int = 4096) -> None:
        self._device = device
        self._deterministic = deterministic
        self._scratch_rows = scratch_rows
        self._works: dict[_Key, AttentionWork] = {}
        self._scratch: dict[tuple[int, int], DecodeScratch] = {}
        self._replaced: list[AttentionWork] = []

    def prepare(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> PreparedAttention:
        """Prepare a step of one KV group, once per step; this launches no kernel."""
        return PreparedAttention(inputs, geometry)

    def run(
        self, qkv: torch.Tensor, pages: KVPages, prepared: PreparedAttention, layer: LayerConstants
    ) -> torch.Tensor:
        """Compute `paged_attention` of kernels/ops/attention/reference.py for a prepared step."""
        inputs, geometry = prepared.inputs, prepared.geometry
        queries = rope_kv(qkv, pages, inputs, geometry, layer)
        num_tokens, num_requests = qkv.shape[0], inputs.seq_lens.shape[0]
        out = torch.empty((num_tokens, geometry.num_heads * geometry.head_dim), dtype=qkv.dtype, device=qkv.device)
        if not num_tokens:
            return out
        work = prepared.work
        cascade = self._cascade(inputs, geometry)
        if work is None:
            work = prepared.work = self._work(geometry, prefill_tile(geometry, pages, qkv.dtype, self._device), inputs)
            build_work(inputs.cu_seqlens_q, inputs.seq_lens, work, cascade.shared_lens if cascade else None)
        # Skip launches whose work list would be empty, as far as the host knows.
        only_few = inputs.max_seqlen_q <= work.max_decode_queries
        if work.max_decode_queries and (only_few or num_requests > 1):
            scratch = self._scratch_of(geometry)
            if cascade is not None:
                attention_cascade(queries, pages, inputs, geometry, work, cascade, scratch)
            attention_decode(queries, pages, inputs, geometry, work, scratch, out, layer.sinks)
        if not only_few:
            attention_prefill(queries, pages, inputs, geometry, layer.sinks, work, out)
        return out

    def _cascade(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> CascadeWork | None:
        """Return the cascade's work, or None with a sliding window, which does not see the whole shared prefix."""
        return None if self._deterministic or geometry.window is not None else inputs.cascade

    def _work(self, geometry: AttentionGeometry, tile: int, inputs: AttentionInputs) -> AttentionWork:
        max_tokens, max_requests = inputs.positions.shape[0], inputs.seq_lens.shape[0]
        key = geometry, tile
        work = self._works.get(key)
        if work is not None:
            room = work.prefill_tiles.shape[0]
            if max_requests <= work.max_requests and work.max_prefill_tiles(max_tokens, max_requests) <= room:
                return work
            self._replaced.append(work)
            max_tokens = max(max_tokens, (room - work.max_requests) * tile)
            max_requests = max(max_requests, work.max_requests)
        few = 0 if self._deterministic else max_decode_queries(geometry.num_heads, geometry.num_kv_heads)
        self._works[key] = make_work(
            1 << (max_requests - 1).bit_length(),
            1 << (max_tokens - 1).bit_length(),
            self._device,
            max_decode_queries=few,
            prefill_tile=tile,
            window=geometry.window,
            scratch_rows=0 if self._deterministic else self._scratch_rows,
        )
        return self._works[key]

    def _scratch_of(self, geometry: AttentionGeometry) -> DecodeScratch:
        key = geometry.num_heads, geometry.head_dim
        if key not in self._scratch:
            self._scratch[key] = make_scratch(self._scratch_rows, *key, self._device)
        return self._scratch[key]
