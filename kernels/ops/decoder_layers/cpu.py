"""All layers of a step in one parallel region: norms, projections, attention, SiLU.

With one row, entering and leaving the eight ops of a layer takes as long as computing them, and with sixteen rows
still a third of the time. Here the threads enter once and synchronize five or seven times per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numba import cfunc, types

from kernels.common.cpu.pool import Kernel, num_threads
from kernels.common.cpu.simd import WIDTH, atomic_add, load_f32, load_i64, wait_for
from kernels.ops.attention.cpu import PreparedAttention, attend_cells, attend_pairs, scratch_size
from kernels.ops.attention.cpu import supported as attention_supported
from kernels.ops.attention.inputs import AttentionGeometry
from kernels.ops.attention.kv_pages import KVPages, stored_in_pairs
from kernels.ops.decoder_layers.inputs import LayerWeights, uniform
from kernels.ops.decoder_layers.phases import OWN_ROWS, normalize, project
from kernels.ops.linear_panels.cpu import CHUNK_ROWS, FEW_ROWS, Result, scratch_bytes
from kernels.ops.linear_panels.cpu import supported as linear_supported
from kernels.ops.linear_panels.micro import BLOCK

# Byte offsets of the addresses within a layer's row of the table; a linear layer has two words.
_QKV, _OUTPUT, _MLP_NORM, _GATE_UP, _DOWN, _KEYS, _VALUES = 8, 24, 40, 48, 64, 80, 88
_LAYER_BYTES = 128
_PHASE_BYTES = 64
"""Size of a phase's counters in bytes, one cache line."""
_ATTENDED = 32
"""Byte offset of attention's counter of finished tiles."""


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
        """Width of the attention output."""
        return self.geometry.num_heads * self.geometry.head_dim

    @property
    def qkv(self) -> int:
        """Combined width of queries, keys and values."""
        return (self.geometry.num_heads + 2 * self.geometry.num_kv_heads) * self.geometry.head_dim


def supported(shape: Shape, layers: Sequence[LayerWeights]) -> bool:
    """Return True if the op supports the model on this processor."""
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
    """Compile the kernel for one model's shapes.

    The closure contains only integers, so that numba finds the kernel in its cache.
    """
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
        # Passed as values, because numba would compile a projection again for each constant.
        wide, between = types.int64(hidden), types.int64(intermediate)
        qkv_out, attention_out = types.int64(width), types.int64(inner)
        plain, add, gate = types.int64(rounded), types.int64(added), types.int64(gated_result)
        for index in range(num_layers):
            layer = table + index * _LAYER_BYTES
            for start in range(0, rows, CHUNK_ROWS):
                count = min(rows - start, CHUNK_ROWS)
                r = residual + start * wide * 4
                x = normalize(r, load_i64(layer), own_x, normed, count, wide, eps, sync)
                target = qkv + start * qkv_out * 2
                project(
                    bits, minimum, plain, few, count, x, wide, sums, layer + _QKV, target, qkv_out, threads,
                    sync + _PHASE_BYTES, own,
                )  # fmt: skip
                sync += 2 * _PHASE_BYTES
            if paired:
                attend_pairs(
                    block, qkv, attended, load_i64(layer + _KEYS), load_i64(layer + _VALUES), sync, num_heads,
                    num_kv_heads, dim, rotary_dim, page, 1, kv_bf16,
                )  # fmt: skip
            else:
                attend_cells(
                    block, qkv, attended, load_i64(layer + _KEYS), load_i64(layer + _VALUES), sync, num_heads,
                    num_kv_heads, dim, rotary_dim, page, 1, kv_bf16,
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
                x = normalize(r, load_i64(layer + _MLP_NORM), own_x, normed, count, wide, eps, sync)
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
    """Compile the kernel for layers of these sizes and this kind of weights."""
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
    """Fused decoder layers of one model.

    Args:
        layers: Weights of the layers, which the op keeps; their tensors must not move.
        fixed: Sum in the same order for any number of rows.
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
        self._kernel.store(1, self._table)
        self._kernel.store(12, self._scratch, self._scratch.stride(0) * 4, self._constants)
        self._kernel.store(16, len(layers), self._constants[1:])
        self._kernel.store(21, self._threads)
        self._make_room(FEW_ROWS)

    def __call__(self, residual: torch.Tensor, pages: Sequence[KVPages], prepared: PreparedAttention) -> None:
        """Add the output of all layers to the residual and write keys and values.

        Args:
            residual: [T, hidden] float32 with T >= 1, updated in place.
            pages: Pages of each layer.
            prepared: Inputs of the step.

        Raises:
            ValueError: The pages are not of the kind for which the op was compiled.
        """
        if self._pages is not pages[0].keys:
            self._use(pages)
        rows = residual.shape[0]
        if rows > self._rows:
            self._make_room(rows)
        self._counters.zero_()
        self._kernel.store(0, residual)
        self._kernel.store(22, int(self._fixed or rows <= FEW_ROWS))
        prepared.write_step(self._kernel)
        self._kernel.run(self._threads)

    def _use(self, pages: Sequence[KVPages]) -> None:
        """Store the addresses of the pages. The tensors must not move while steps use them."""
        geometry, dtype = self._shape.geometry, self._shape.kv_dtype
        paired = stored_in_pairs(dtype, geometry.head_dim, geometry.page_size)
        cells = geometry.num_kv_heads * geometry.page_size * geometry.head_dim
        kinds = {(one.keys.dtype, one.paired, one.keys.stride(0), one.values.stride(0)) for one in pages}
        if len(pages) != len(self._layers) or kinds != {(dtype, paired, cells, cells)}:
            raise ValueError("the KV pages must have the dtype and storage kind for which the layers were compiled")
        for row, one in zip(self._table, pages):
            row[_KEYS // 8], row[_VALUES // 8] = one.keys.data_ptr(), one.values.data_ptr()
        self._pages = pages[0].keys

    def _make_room(self, rows: int) -> None:
        """Allocate memory for steps of up to `rows` rows, both the memory that threads share and each thread's own."""
        shape, kernel = self._shape, self._kernel
        widest = max(shape.hidden, shape.inner, shape.intermediate)
        at_a_time = min(rows, CHUNK_ROWS)
        sizes = (rows, shape.qkv), (rows, shape.inner), (at_a_time, shape.intermediate), (at_a_time, shape.hidden)
        shared = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
        kernel.store(2, *shared[:2])
        kernel.store(15, shared[2])
        own_x = scratch_bytes(widest)
        sums = own_x + OWN_ROWS * shape.hidden * 2
        size = sums + (at_a_time if self._fixed else min(rows, FEW_ROWS)) * widest // BLOCK * 4
        own = torch.zeros((self._threads, -(-size // 64) * 64), dtype=torch.uint8)
        kernel.store(19, own, own.stride(0))
        kernel.store(23, shared[3], own_x, sums)
        # Per layer: one attention, and two norms and four projections for each chunk of rows.
        phases = 1 + 6 * -(-rows // CHUNK_ROWS)
        self._counters = torch.zeros(len(self._layers) * phases * _PHASE_BYTES // 8, dtype=torch.int64)
        kernel.store(18, self._counters)
        self._buffers = [*shared, own]
        self._rows = rows


def _table(layers: Sequence[LayerWeights]) -> torch.Tensor:
    """Return a [layers, 16] int64 table of addresses: a norm's weight and two linears, twice.

    The addresses of keys and values are stored later.
    """
    table = torch.zeros((len(layers), _LAYER_BYTES // 8), dtype=torch.int64)
    for row, layer in zip(table, layers):
        words = [layer.attention_norm.data_ptr()]
        for number, linear in enumerate(layer.linears):
            if number == 2:
                words.append(layer.mlp_norm.data_ptr())
            words += [linear.weight.panels.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()]
        row[: len(words)] = torch.tensor(words)
    return table
