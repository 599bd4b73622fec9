"""Paged attention of a step out of its kernels: keys and values are written, then few and many queries are attended."""

from __future__ import annotations

import torch

from kernels.ops.attention.cascade import CascadeWork
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.attention_cascade.triton import attention_cascade
from kernels.ops.attention_decode.inputs import DecodeScratch, make_scratch
from kernels.ops.attention_decode.triton import attention_decode
from kernels.ops.attention_prefill.triton import attention_prefill, prefill_tile
from kernels.ops.attention_work.inputs import AttentionWork, make_work, max_decode_queries
from kernels.ops.attention_work.triton import build_work
from kernels.ops.rope_kv.triton import rope_kv

_Key = tuple[AttentionGeometry, int]


class PreparedAttention:
    """One step of one KV group: its inputs, and the work list that its first layer builds and the others read."""

    __slots__ = ("geometry", "inputs", "work")

    def __init__(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> None:
        self.inputs = inputs
        self.geometry = geometry
        self.work: AttentionWork | None = None


class TritonAttention:
    """Holds the buffers that all steps share: work lists of each KV group, scratch for partial results.

    Steps of one stream take turns with them. They grow when a step is larger than all before; those that were replaced
    are kept, because captured graphs go on using them.

    Args:
        deterministic: a token's result does not depend on the batch or on how its request is cut into chunks: all
            queries go through the kernel of prompts.
        scratch_rows: partial results of decoding requests that there is room for, of all heads; a request beyond that
            is computed in one piece.
    """

    def __init__(self, device: torch.device, *, deterministic: bool = False, scratch_rows: int = 4096) -> None:
        self._device = device
        self._deterministic = deterministic
        self._scratch_rows = scratch_rows
        self._works: dict[_Key, AttentionWork] = {}
        self._scratch: dict[tuple[int, int], DecodeScratch] = {}
        self._replaced: list[AttentionWork] = []

    def prepare(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> PreparedAttention:
        """Once per step and KV group; launches nothing yet."""
        return PreparedAttention(inputs, geometry)

    def run(
        self, qkv: torch.Tensor, pages: KVPages, prepared: PreparedAttention, layer: LayerConstants
    ) -> torch.Tensor:
        """`paged_attention` of kernels/ops/attention/reference.py, for what `prepare` gave."""
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
        # What the host knows of the step spares launches that would find nothing in their list.
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
        """A window does not see a prefix as a whole."""
        return None if self._deterministic or geometry.window is not None else inputs.cascade

    def _work(self, geometry: AttentionGeometry, tile: int, inputs: AttentionInputs) -> AttentionWork:
        max_tokens, max_requests = inputs.positions.shape[0], inputs.seq_lens.shape[0]
        key = geometry, tile
        work = self._works.get(key)
        if work is not None:
            room = work.prefill_tiles.shape[0]
            if max_requests <= work.max_requests and work.most_prefill_tiles(max_tokens, max_requests) <= room:
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
