"""Rotary embedding, KV write and paged grouped-query attention on the CPU, in one parallel region.

The threads first rotate and write the keys and values of all tokens, divided into blocks of tokens. They then process
tiles of up to 16 tokens of one request and one KV head. A tile processes its context in blocks of keys with the
running maximum and sum of an online softmax (Milakov and Gimelshein 2018), so that its scores stay in the cache. The
arithmetic of a row depends only on the row's own position, not on its tile or batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import cfunc, literally, types

from kernels.common.cpu.pool import Kernel, num_threads
from kernels.common.cpu.simd import (
    WIDTH,
    atomic_add,
    inner,
    load_f32,
    load_i32,
    load_i64,
    vload,
    vstore,
    wait_for,
)
from kernels.ops.attention.cells import attend_to_cells, write_key
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import stored_in_pairs
from kernels.ops.attention.micro import line_values
from kernels.ops.attention.micro_pairs import MAX_FEW_QUERIES, line_keys
from kernels.ops.attention.pairs import attend_to_pairs, write_paired_key, write_paired_value
from kernels.ops.attention.rows import TILE_TOKENS, tile_rows

_NO_WINDOW = 2**31 - 1


def supported(geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Return True if the kernel supports these shapes."""
    return (
        geometry.head_dim % WIDTH == 0
        and geometry.rotary_dim % (2 * WIDTH) == 0
        and geometry.page_size % 8 == 0
        and dtype in (torch.float32, torch.bfloat16)
        and kv_dtype in (torch.float32, torch.bfloat16)
    )


def scratch_size(geometry: AttentionGeometry) -> int:
    """Return the number of float32 values of scratch memory that one thread needs with either storage of pages."""
    rows = tile_rows(geometry.num_heads // geometry.num_kv_heads)
    cells = rows * (2 * geometry.head_dim + line_values(geometry.page_size) + 2 * WIDTH)
    lines = MAX_FEW_QUERIES * line_keys(geometry.page_size)
    pairs = (rows + MAX_FEW_QUERIES) * (3 * geometry.head_dim // 2 + 2 * WIDTH) + lines
    return max(cells, pairs)


def _make_attend(paired: bool) -> Any:
    """Return `attend` for pages stored in pairs or as single cells; the other variant is not compiled."""

    @inner
    def attend(
        block: Any,
        qkv: Any,
        out: Any,
        keys: Any,
        values: Any,
        counters: Any,
        num_heads: Any,
        num_kv_heads: Any,
        dim: Any,
        rotary_dim: Any,
        page: Any,
        bf16: Any,
        kv_bf16: Any,
    ) -> None:
        """Compute one thread's part of the operation. All arguments from num_heads on are literals.

        block[4:15] contains the values that are the same for all layers of a step. counters: five int64 zeros; the
        last one counts finished tiles, once per KV head.
        """
        literally(num_kv_heads)
        literally(num_heads)
        literally(dim)
        literally(rotary_dim)
        literally(page)
        literally(bf16)
        literally(kv_bf16)
        positions, slots, rope, table, table_width = block[4], block[5], block[6], block[7], block[8]
        num_tokens, tiles, num_tiles, scratch, scratch_bytes = block[9], block[10], block[11], block[12], block[13]
        element = 2 if bf16 else 4
        kv_element = 2 if kv_bf16 else 4
        width = (num_heads + 2 * num_kv_heads) * dim
        page_bytes = page * dim * kv_element
        scale, window, softcap = load_f32(block[14]), load_i32(tiles), load_f32(tiles + 4)
        # Adjacent slots share a cache line, for which threads should not contend.
        share = 32 if num_tokens >= 128 else 8

        while True:
            first = atomic_add(counters, 1) * share
            if first >= num_tokens:
                break
            last = min(first + share, num_tokens)
            for token in range(first, last):
                slot = load_i64(slots + token * 8)
                row = rope + load_i32(positions + token * 4) * rotary_dim * 4
                for h in range(num_kv_heads):
                    target = (slot // page * num_kv_heads + h) * page_bytes
                    source = qkv + (token * width + (num_heads + h) * dim) * element
                    value = source + num_kv_heads * dim * element
                    if paired:
                        at = keys + target + slot % page * 4
                        write_paired_key(source, row, at, dim, rotary_dim, page, bf16, kv_bf16)
                        write_paired_value(value, values + target, slot % page, dim, bf16)
                    else:
                        at = keys + target + slot % page * kv_element
                        write_key(source, row, at, dim, rotary_dim, page, bf16, kv_bf16)
                        target += slot % page * dim * kv_element
                        for i in range(0, dim, 16):
                            vstore(values + target + i * kv_element, vload(value + i * element, bf16), kv_bf16)
            atomic_add(counters + 8, last - first)
        wait_for(counters + 8, num_tokens)

        own = scratch + atomic_add(counters + 16, 1) * scratch_bytes
        done = 0
        while True:
            ticket = atomic_add(counters + 24, 1)
            if ticket >= num_tiles * num_kv_heads:
                break
            tile = tiles + (1 + ticket // num_kv_heads) * 12
            h = ticket % num_kv_heads
            request, start, count = load_i32(tile), load_i32(tile + 4), load_i32(tile + 8)
            pages = table + request * table_width * 4
            if paired:
                attend_to_pairs(
                    qkv, out, keys, values, positions, rope, pages, own, start, count, h, scale, window, softcap,
                    num_heads, num_kv_heads, dim, rotary_dim, page, bf16,
                )  # fmt: skip
            else:
                attend_to_cells(
                    qkv, out, keys, values, positions, rope, pages, own, start, count, h, scale, window, softcap,
                    num_heads, num_kv_heads, dim, rotary_dim, page, bf16, kv_bf16,
                )  # fmt: skip
            done += 1
        atomic_add(counters + 32, done)

    return attend


# Selecting by a literal would compile both variants, so each kernel selects by a constant of its own.
attend_pairs = _make_attend(True)
attend_cells = _make_attend(False)


def compile_attention(
    num_heads: int, num_kv_heads: int, dim: int, rotary_dim: int, page: int, bf16: int, kv_bf16: int, paired: int
) -> Any:
    """Compile the kernel for one geometry.

    The closure contains only integers, so that numba finds the kernel in its cache.
    """

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def attention(block: Any) -> None:
        if paired:
            attend_pairs(
                block, block[0], block[1], block[2], block[3], block[31], num_heads, num_kv_heads, dim, rotary_dim,
                page, bf16, kv_bf16,
            )  # fmt: skip
        else:
            attend_cells(
                block, block[0], block[1], block[2], block[3], block[31], num_heads, num_kv_heads, dim, rotary_dim,
                page, bf16, kv_bf16,
            )  # fmt: skip

    return attention


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """Inputs of a step with its tiles; see `make_tiles`."""

    inputs: AttentionInputs
    geometry: AttentionGeometry
    tiles: np.ndarray[Any, np.dtype[np.int32]]

    def write_step(self, kernel: Kernel) -> None:
        """Store the part of the arguments that describes the step to `attend`: block[4:12]."""
        inputs, geometry = self.inputs, self.geometry
        self.tiles[0, 0] = _NO_WINDOW if geometry.window is None else geometry.window
        self.tiles[0, 1:2].view(np.float32)[0] = geometry.softcap or 0.0
        kernel.store(4, inputs.positions, inputs.slot_mapping, inputs.rope_table, inputs.block_table)
        kernel.store(8, inputs.block_table.stride(0), inputs.positions.shape[0])
        kernel.store(10, self.tiles.ctypes.data, self.tiles.shape[0] - 1)


def make_tiles(inputs: AttentionInputs) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Divide each request's tokens into tiles of at most TILE_TOKENS.

    Returns:
        [1 + num_tiles, 3] int32: request, first token, number of tokens; the most expensive tiles first. The first
            row is reserved for the geometry's window and soft cap.
    """
    bounds = inputs.cu_seqlens_q.numpy()
    lengths = inputs.seq_lens.numpy()
    counts = bounds[1:] - bounds[:-1]
    per_request = -(-counts // TILE_TOKENS)
    request = np.repeat(np.arange(counts.size), per_request)
    index = np.arange(request.size) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    start = bounds[:-1][request] + index * TILE_TOKENS
    count = np.minimum(TILE_TOKENS, bounds[1:][request] - start)
    context = lengths[request] - counts[request] + index * TILE_TOKENS + count
    tiles = np.zeros((1 + request.size, 3), dtype=np.int32)
    tiles[1:] = np.stack((request, start, count), axis=1)[np.argsort(-context * count, kind="stable")]
    return tiles


class PagedAttention:
    """Paged attention for one geometry and one pair of dtypes.

    Args:
        geometry: Shapes and constants.
        dtype: Dtype of queries.
        kv_dtype: Dtype of cells.
        paired: True if the pages are stored in pairs; None for the default of this processor.
    """

    def __init__(
        self, geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype, *, paired: bool | None = None
    ) -> None:
        if paired is None:
            paired = stored_in_pairs(kv_dtype, geometry.head_dim, geometry.page_size)
        self._function = compile_attention(
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.rotary_dim,
            geometry.page_size,
            int(dtype is torch.bfloat16),
            int(kv_dtype is torch.bfloat16),
            int(paired),
        )
        self._kernel = Kernel(self._function.address)
        self._geometry = geometry
        self._threads = num_threads()
        size = -(-scratch_size(geometry) // WIDTH) * WIDTH
        self._scratch = torch.zeros((self._threads, size), dtype=torch.float32)
        self._scale = torch.tensor([geometry.scale], dtype=torch.float32)
        self._kernel.store(12, self._scratch, size * 4, self._scale)
        self._prepared: PreparedAttention | None = None

    def __call__(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: PreparedAttention
    ) -> torch.Tensor:
        """Compute the reference; keys and values have the CPU layout (kernels/ops/attention/kv_pages.py)."""
        if prepared is not self._prepared:
            prepared.write_step(self._kernel)
            self._prepared = prepared
        out = torch.empty((qkv.shape[0], self._geometry.num_heads * self._geometry.head_dim), dtype=qkv.dtype)
        self._kernel.store(0, qkv, out, keys, values)
        self._kernel.run(self._threads)
        return out
