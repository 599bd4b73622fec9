"""All layers of a small decode step in one parallel region: norms, projections of 4 or 8 bits, attention, SiLU.

At one row a layer's eight ops cost as much to enter and leave as to compute. Here threads enter once and meet five
times a layer. Every thread normalises and gates for itself, which is cheaper than waiting for another to do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numba import cfunc, types

from kernels.attention.cpu import PreparedAttention, attend, scratch_size
from kernels.attention.cpu import supported as attention_supported
from kernels.attention.inputs import AttentionGeometry
from kernels.attention.kv_pages import KVPages
from kernels.cpu.pool import Kernel, num_threads
from kernels.cpu.simd import WIDTH, atomic_add, load_f32, load_i64
from kernels.few_rows_layers.inputs import LayerWeights, uniform
from kernels.few_rows_layers.phases import gate, normalise, project, wait_for
from kernels.linear_weight_only.cpu import MAX_ROWS
from kernels.linear_weight_only.cpu import supported as processor_supported

_LAYER_WORDS = 16
_PHASE_BYTES = 64
_PHASES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model; num_tokens of a step are at most MAX_ROWS."""

    hidden: int
    intermediate: int
    geometry: AttentionGeometry
    eps: float
    kv_dtype: torch.dtype


def supported(shape: Shape, layers: Sequence[LayerWeights]) -> bool:
    """Whether the op covers the model, on this processor."""
    geometry = shape.geometry
    return (
        processor_supported()
        and attention_supported(geometry, torch.bfloat16, shape.kv_dtype)
        and shape.hidden % WIDTH == 0
        and shape.intermediate % WIDTH == 0
        and len(layers) > 0
        and uniform(list(layers))
    )


def compile_layers(
    bits: int,
    minimum: int,
    hidden: int,
    intermediate: int,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    rotary_dim: int,
    page: int,
    kv_bf16: int,
) -> Any:
    """The kernel for one model's shapes; the closure holds integers only, so that numba finds it in its cache again."""
    group = num_heads // num_kv_heads
    stride = (page * max(1, 128 // page) + 15) // 16 * 16
    few_rows = min(group, 6)
    slot_bytes = page * (2 if kv_bf16 else 4)
    page_bytes = slot_bytes * dim
    width = (num_heads + 2 * num_kv_heads) * dim
    inner = num_heads * dim

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def layers(block: Any) -> None:
        residual, table, qkv, attended, gated = block[0], block[1], block[2], block[3], block[15]
        num_layers, counters, pieces, rows = block[16], block[18], block[21], block[9]
        eps = load_f32(block[17])
        own = block[19] + atomic_add(block[31], 1) * block[20]
        tickets = block[11] * num_kv_heads
        for index in range(num_layers):
            layer = table + index * 128
            sync = counters + index * 320
            normalise(residual, load_i64(layer), own, rows, hidden, eps)
            project(bits, minimum, 0, rows, own, hidden, layer + 8, qkv, width, pieces, sync)
            attend(
                block, qkv, attended, load_i64(layer + 112), load_i64(layer + 120), sync + 64, num_heads, num_kv_heads,
                dim, rotary_dim, page, 1, kv_bf16, few_rows, stride, page_bytes, slot_bytes,
            )  # fmt: skip
            wait_for(sync + 96, tickets)
            project(bits, minimum, 1, rows, attended, inner, layer + 32, residual, hidden, pieces, sync + 128)
            normalise(residual, load_i64(layer + 56), own, rows, hidden, eps)
            project(bits, minimum, 0, rows, own, hidden, layer + 64, gated, 2 * intermediate, pieces, sync + 192)
            gate(gated, own, rows, intermediate)
            project(bits, minimum, 1, rows, own, intermediate, layer + 88, residual, hidden, pieces, sync + 256)

    return layers


def compile_for(shape: Shape, bits: int, minimum: bool) -> Any:
    """The kernel for layers of these sizes and weights of this kind."""
    geometry = shape.geometry
    return compile_layers(
        bits,
        int(minimum),
        shape.hidden,
        shape.intermediate,
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.rotary_dim,
        geometry.page_size,
        int(shape.kv_dtype is torch.bfloat16),
    )


class FewRowsLayers:
    """The op for one model.

    Args:
        layers: kept; their tensors must stay where they are.
    """

    def __init__(self, shape: Shape, layers: Sequence[LayerWeights]) -> None:
        geometry, first = shape.geometry, layers[0].qkv.weight
        self._function = compile_for(shape, first.bits, first.has_minimum)
        self._kernel = Kernel(self._function.address)
        self._threads = num_threads()
        self._layers = list(layers)
        self._table = _table(layers)
        self._pages: torch.Tensor | None = None
        width = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
        inner = geometry.num_heads * geometry.head_dim
        widest = max(shape.hidden, shape.intermediate)
        self._buffers = [
            torch.zeros((MAX_ROWS, n), dtype=torch.bfloat16) for n in (width, inner, 2 * shape.intermediate)
        ]
        self._own = torch.zeros((self._threads, MAX_ROWS * widest), dtype=torch.bfloat16)
        self._scratch = torch.zeros((self._threads, -(-scratch_size(geometry) // WIDTH) * WIDTH))
        self._counters = torch.zeros(len(layers) * _PHASES * _PHASE_BYTES // 8, dtype=torch.int64)
        self._constants = torch.tensor([geometry.scale, shape.eps], dtype=torch.float32)
        block = self._kernel.block
        block[1] = self._table.data_ptr()
        block[2], block[3], block[15] = (buffer.data_ptr() for buffer in self._buffers)
        block[12], block[13] = self._scratch.data_ptr(), self._scratch.stride(0) * 4
        block[14], block[17] = self._constants.data_ptr(), self._constants.data_ptr() + 4
        block[16] = len(layers)
        block[18] = self._counters.data_ptr()
        block[19], block[20] = self._own.data_ptr(), self._own.stride(0) * 2
        block[21] = self._threads

    def __call__(self, residual: torch.Tensor, pages: Sequence[KVPages], prepared: PreparedAttention) -> None:
        """Adds all layers to the [T, hidden] float32 residual, T in 1..MAX_ROWS, and writes keys and values."""
        if self._pages is not pages[0].keys:
            for row, one in zip(self._table, pages):
                row[14], row[15] = one.keys.data_ptr(), one.values.data_ptr()
            self._pages = pages[0].keys
        self._counters.zero_()
        block = self._kernel.block
        block[0] = residual.data_ptr()
        prepared.tell(block)
        self._kernel.run(self._threads)


def _table(layers: Sequence[LayerWeights]) -> torch.Tensor:
    """[layers, 16] int64 addresses: a norm's weight and two linears, twice, then (later) keys and values."""
    table = torch.zeros((len(layers), _LAYER_WORDS), dtype=torch.int64)
    for row, layer in zip(table, layers):
        words = [layer.attention_norm.data_ptr()]
        for number, linear in enumerate(layer.linears):
            if number == 2:
                words.append(layer.mlp_norm.data_ptr())
            bias = 0 if linear.bias is None else linear.bias.data_ptr()
            words += [linear.weight.codes.data_ptr(), linear.weight.factors.data_ptr(), bias]
        row[: len(words)] = torch.tensor(words)
    return table
