"""All layers of a step in one parallel region: norms, projections, attention, SiLU.

At one row a layer's eight ops cost as much to enter and leave as to compute, and at sixteen still a third. Here threads
enter once and meet five times a layer, or seven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numba import cfunc, types

from kernels.common.cpu.pool import Kernel, num_threads
from kernels.common.cpu.simd import WIDTH, atomic_add, load_f32, load_i64, wait_for
from kernels.ops.attention.cpu import PreparedAttention, attend_cells, attend_pairs, cell_sizes, scratch_size
from kernels.ops.attention.cpu import supported as attention_supported
from kernels.ops.attention.inputs import AttentionGeometry
from kernels.ops.attention.kv_pages import KVPages, stored_in_pairs
from kernels.ops.decoder_layers.inputs import LayerWeights, uniform
from kernels.ops.decoder_layers.phases import OWN_ROWS, normalise, project
from kernels.ops.linear_panels.cpu import CHUNK_ROWS, FEW_ROWS, Result, scratch_bytes
from kernels.ops.linear_panels.cpu import supported as linear_supported
from kernels.ops.linear_panels.micro import BLOCK

# Where in a layer's words of the table its addresses are, in bytes; a linear has two words.
_QKV, _OUTPUT, _MLP_NORM, _GATE_UP, _DOWN, _KEYS, _VALUES = 8, 24, 40, 48, 64, 80, 88
_LAYER_BYTES = 128
_PHASE_BYTES = 64
"""Counters of a phase, a cache line."""
_ATTENDED = 32
"""Bytes to attention's counter of tiles that are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    intermediate: int
    geometry: AttentionGeometry
    eps: float
    kv_dtype: torch.dtype

    @property
    def inner(self) -> int:
        """Width of what attention gives."""
        return self.geometry.num_heads * self.geometry.head_dim

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values."""
        return (self.geometry.num_heads + 2 * self.geometry.num_kv_heads) * self.geometry.head_dim


def supported(shape: Shape, layers: Sequence[LayerWeights]) -> bool:
    """Whether the op covers the model, on this processor."""
    inputs = shape.hidden, shape.inner, shape.intermediate
    return (
        attention_supported(shape.geometry, torch.bfloat16, shape.kv_dtype)
        and all(linear_supported(num_in) for num_in in inputs)
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
    paired: int,
) -> Any:
    """The kernel for one model's shapes; the closure holds integers only, so that numba finds it in its cache again."""
    few_rows, stride, page_bytes, slot_bytes = cell_sizes(num_heads, num_kv_heads, dim, page, kv_bf16)
    width = (num_heads + 2 * num_kv_heads) * dim
    inner = num_heads * dim
    rounded, added, gated_result = int(Result.BFLOAT16), int(Result.ADD), int(Result.GATE)

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def layers(block: Any) -> None:
        residual, table, qkv, attended, gated, normed = block[0], block[1], block[2], block[3], block[15], block[23]
        num_layers, sync, threads, rows, few = block[16], block[18], block[21], block[9], block[22] != 0
        eps = load_f32(block[17])
        own = block[19] + atomic_add(block[31], 1) * block[20]
        own_x, sums = own + block[24], own + block[25]
        tickets = block[11] * num_kv_heads
        # As values, not as constants: for each constant numba would compile all of a projection anew.
        wide, between = types.int64(hidden), types.int64(intermediate)
        qkv_out, attention_out = types.int64(width), types.int64(inner)
        plain, add, gate = types.int64(rounded), types.int64(added), types.int64(gated_result)
        for index in range(num_layers):
            layer = table + index * _LAYER_BYTES
            for start in range(0, rows, CHUNK_ROWS):
                count = min(rows - start, CHUNK_ROWS)
                r = residual + start * wide * 4
                x = normalise(r, load_i64(layer), own_x, normed, count, wide, eps, sync)
                target = qkv + start * qkv_out * 2
                project(
                    bits, minimum, plain, few, count, x, wide, sums, layer + _QKV, target, qkv_out, threads,
                    sync + _PHASE_BYTES, own,
                )  # fmt: skip
                sync += 2 * _PHASE_BYTES
            if paired:
                attend_pairs(
                    block, qkv, attended, load_i64(layer + _KEYS), load_i64(layer + _VALUES), sync, num_heads,
                    num_kv_heads, dim, rotary_dim, page, 1, kv_bf16, few_rows, stride, page_bytes, slot_bytes,
                )  # fmt: skip
            else:
                attend_cells(
                    block, qkv, attended, load_i64(layer + _KEYS), load_i64(layer + _VALUES), sync, num_heads,
                    num_kv_heads, dim, rotary_dim, page, 1, kv_bf16, few_rows, stride, page_bytes, slot_bytes,
                )  # fmt: skip
            wait_for(sync + _ATTENDED, tickets)
            sync += _PHASE_BYTES
            for start in range(0, rows, CHUNK_ROWS):
                count = min(rows - start, CHUNK_ROWS)
                r = residual + start * wide * 4
                x = attended + start * attention_out * 2
                project(
                    bits, minimum, add, few, count, x, attention_out, sums, layer + _OUTPUT, r, wide, threads, sync, own
                )
                sync += _PHASE_BYTES
                x = normalise(r, load_i64(layer + _MLP_NORM), own_x, normed, count, wide, eps, sync)
                sync += _PHASE_BYTES
                project(
                    bits, minimum, gate, few, count, x, wide, sums, layer + _GATE_UP, gated, 2 * between, threads, sync,
                    own,
                )  # fmt: skip
                sync += _PHASE_BYTES
                project(
                    bits, minimum, add, few, count, gated, between, sums, layer + _DOWN, r, wide, threads, sync, own
                )
                sync += _PHASE_BYTES

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
        int(stored_in_pairs(shape.kv_dtype, geometry.head_dim, geometry.page_size)),
    )


class DecoderLayers:
    """The op for one model.

    Args:
        layers: kept; their tensors must stay where they are.
        fixed: sum up in the same order for any number of rows.
    """

    def __init__(self, shape: Shape, layers: Sequence[LayerWeights], *, fixed: bool = False) -> None:
        geometry = shape.geometry
        self._function = compile_for(shape, *layers[0].qkv.weight.kind)
        self._kernel = Kernel(self._function.address)
        self._threads = num_threads()
        self._layers = list(layers)
        self._fixed = fixed
        self._shape = shape
        self._table = _table(layers)
        self._pages: torch.Tensor | None = None
        self._scratch = torch.zeros((self._threads, -(-scratch_size(geometry) // WIDTH) * WIDTH))
        self._counters = torch.empty(0)
        self._constants = torch.tensor([geometry.scale, shape.eps], dtype=torch.float32)
        self._rows = 0
        self._buffers: list[torch.Tensor] = []
        block = self._kernel.block
        block[1] = self._table.data_ptr()
        block[12], block[13] = self._scratch.data_ptr(), self._scratch.stride(0) * 4
        block[14], block[17] = self._constants.data_ptr(), self._constants.data_ptr() + 4
        block[16] = len(layers)
        block[21] = self._threads
        self._make_room(FEW_ROWS)

    def __call__(self, residual: torch.Tensor, pages: Sequence[KVPages], prepared: PreparedAttention) -> None:
        """Adds all layers to the [T, hidden] float32 residual, T at least 1, and writes keys and values.

        Args:
            pages: each layer's. Raises ValueError where they are not of the kind that the op is compiled for.
        """
        if self._pages is not pages[0].keys:
            self._use(pages)
        rows = residual.shape[0]
        if rows > self._rows:
            self._make_room(rows)
        self._counters.zero_()
        block = self._kernel.block
        block[0] = residual.data_ptr()
        block[22] = int(self._fixed or rows <= FEW_ROWS)
        prepared.tell(block)
        self._kernel.run(self._threads)

    def _use(self, pages: Sequence[KVPages]) -> None:
        """Takes down where they are. The tensors must stay there while steps use them."""
        geometry, dtype = self._shape.geometry, self._shape.kv_dtype
        paired = stored_in_pairs(dtype, geometry.head_dim, geometry.page_size)
        cells = geometry.num_kv_heads * geometry.page_size * geometry.head_dim
        kinds = {(one.keys.dtype, one.paired, one.keys.stride(0), one.values.stride(0)) for one in pages}
        if len(pages) != len(self._layers) or kinds != {(dtype, paired, cells, cells)}:
            raise ValueError("the pages are not of the kind that the layers were fused for")
        for row, one in zip(self._table, pages):
            row[_KEYS // 8], row[_VALUES // 8] = one.keys.data_ptr(), one.values.data_ptr()
        self._pages = pages[0].keys

    def _make_room(self, rows: int) -> None:
        """Memory for steps of as many rows: what threads share, and each thread's own."""
        shape, block = self._shape, self._kernel.block
        widest = max(shape.hidden, shape.inner, shape.intermediate)
        at_a_time = min(rows, CHUNK_ROWS)
        sizes = (rows, shape.qkv), (rows, shape.inner), (at_a_time, shape.intermediate), (at_a_time, shape.hidden)
        shared = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
        block[2], block[3], block[15], block[23] = (buffer.data_ptr() for buffer in shared)
        own_x = scratch_bytes(widest)
        sums = own_x + OWN_ROWS * shape.hidden * 2
        size = sums + (at_a_time if self._fixed else min(rows, FEW_ROWS)) * widest // BLOCK * 4
        own = torch.zeros((self._threads, -(-size // 64) * 64), dtype=torch.uint8)
        block[19], block[20], block[24], block[25] = own.data_ptr(), own.stride(0), own_x, sums
        # Of a layer attention, and of each chunk of rows two norms and four projections.
        phases = 1 + 6 * -(-rows // CHUNK_ROWS)
        self._counters = torch.zeros(len(self._layers) * phases * _PHASE_BYTES // 8, dtype=torch.int64)
        block[18] = self._counters.data_ptr()
        self._buffers = [*shared, own]
        self._rows = rows


def _table(layers: Sequence[LayerWeights]) -> torch.Tensor:
    """[layers, 16] int64 addresses: a norm's weight and two linears, twice; keys and values come later."""
    table = torch.zeros((len(layers), _LAYER_BYTES // 8), dtype=torch.int64)
    for row, layer in zip(table, layers):
        words = [layer.attention_norm.data_ptr()]
        for number, linear in enumerate(layer.linears):
            if number == 2:
                words.append(layer.mlp_norm.data_ptr())
            words += [linear.weight.panels.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()]
        row[: len(words)] = torch.tensor(words)
    return table
