"""Rotary embedding, KV write and paged grouped-query attention on the CPU, in one parallel region.

First every token's keys and values are rotated and written, blocks of tokens shared out over the threads. When all are
written, tiles of (up to 16 tokens of a request, KV head) are. A tile goes through its context in blocks of keys with
the running maximum and sum of an online softmax (Milakov and Gimelshein 2018), so its scores stay in the cache.
A row's arithmetic depends on its own position only, not on the tile or the batch that it is computed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import cfunc, njit, types

from kernels.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.attention.micro import add_page, score_page
from kernels.attention.rows import clear_rows, load_query, weigh, write_key
from kernels.cpu.pool import Kernel, num_threads
from kernels.cpu.simd import (
    WIDTH,
    atomic_add,
    atomic_load,
    load_f32,
    load_i32,
    load_i64,
    vload,
    vmul,
    vsplat,
    vstore,
)

TILE_TOKENS = 16
ROWS = 6  # queries whose products are accumulated in registers together
_KEY_BLOCK = 128


def supported(geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether the kernel covers these shapes."""
    return (
        geometry.head_dim % WIDTH == 0
        and geometry.rotary_dim % (2 * WIDTH) == 0
        and geometry.page_size % 8 == 0
        and geometry.softcap is None
        and geometry.window is None
        and dtype in (torch.float32, torch.bfloat16)
        and kv_dtype in (torch.float32, torch.bfloat16)
    )


def key_block(page_size: int) -> int:
    """Keys that a tile scores at a time: whole pages."""
    return page_size * max(1, _KEY_BLOCK // page_size)


def scratch_size(geometry: AttentionGeometry) -> int:
    """float32 values of scratch memory that one thread needs."""
    group = geometry.num_heads // geometry.num_kv_heads
    rows = -(-TILE_TOKENS * group // ROWS) * ROWS
    stride = -(-key_block(geometry.page_size) // WIDTH) * WIDTH
    return rows * (2 * geometry.head_dim + stride + 2 * WIDTH)


@njit(inline="always")
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
    few_rows: Any,
    stride: Any,
    page_bytes: Any,
    slot_bytes: Any,
) -> None:
    """One thread's part of the op. Inlined into kernels, where all from num_heads on are constants.

    block[4:15] says what is the same for all layers of a step. counters: five int64 of zeros, of which the last counts
    the tiles that are done, once for each KV head.
    """
    positions, slots, rope, table, table_width = block[4], block[5], block[6], block[7], block[8]
    num_tokens, tiles, num_tiles, scratch, scratch_bytes = block[9], block[10], block[11], block[12], block[13]
    element = 2 if bf16 else 4
    kv_element = 2 if kv_bf16 else 4
    group = num_heads // num_kv_heads
    width = (num_heads + 2 * num_kv_heads) * dim
    max_rows = (16 * group + 5) // 6 * 6
    keys_per_block = page * max(1, 128 // page)
    scale = vsplat(load_f32(block[14]))

    while True:
        first = atomic_add(counters, 1) * 8
        if first >= num_tokens:
            break
        last = min(first + 8, num_tokens)
        for token in range(first, last):
            slot = load_i64(slots + token * 8)
            row = rope + load_i32(positions + token * 4) * rotary_dim * 4
            for h in range(num_kv_heads):
                target = (slot // page * num_kv_heads + h) * page_bytes
                source = qkv + (token * width + (num_heads + h) * dim) * element
                at = keys + target + slot % page * kv_element
                write_key(source, row, at, dim, rotary_dim, slot_bytes, bf16, kv_bf16)
                source += num_kv_heads * dim * element
                target += slot % page * dim * kv_element
                for i in range(0, dim, 16):
                    vstore(values + target + i * kv_element, vload(source + i * element, bf16), kv_bf16)
        atomic_add(counters + 8, last - first)
    while atomic_load(counters + 8) < num_tokens:
        pass

    query = scratch + atomic_add(counters + 16, 1) * scratch_bytes
    sums = query + max_rows * dim * 4
    scores = sums + max_rows * dim * 4
    highest = scores + max_rows * stride * 4
    totals = highest + max_rows * 4
    done = 0
    while True:
        ticket = atomic_add(counters + 24, 1)
        if ticket >= num_tiles * num_kv_heads:
            break
        tile = tiles + ticket // num_kv_heads * 12
        h = ticket % num_kv_heads
        request, start, count = load_i32(tile), load_i32(tile + 4), load_i32(tile + 8)
        pages = table + request * table_width * 4
        rows = count * group
        few = count == 1 and group <= 6
        padded = rows if few else (rows + 5) // 6 * 6
        clear_rows(rows, padded, query, sums, highest, totals, dim)
        for r in range(rows):
            token = start + r // group
            source = qkv + (token * width + (h * group + r % group) * dim) * element
            row = rope + load_i32(positions + token * 4) * rotary_dim * 4
            load_query(source, row, query + r * dim * 4, scale, dim, rotary_dim, bf16)

        context = load_i32(positions + (start + count - 1) * 4) + 1
        for begin in range(0, context, keys_per_block):
            num_keys = min(keys_per_block, context - begin)
            num_pages = (num_keys + page - 1) // page
            for p in range(num_pages):
                at = keys + (load_i32(pages + (begin // page + p) * 4) * num_kv_heads + h) * page_bytes
                line = scores + p * page * 4
                if few:
                    after = load_i32(pages + (begin // page + min(p + 1, num_pages - 1)) * 4)
                    after = keys + (after * num_kv_heads + h) * page_bytes
                    score_page(few_rows, dim, page, kv_bf16, query, at, line, stride, 1, after, at - keys + values)
                else:
                    for r in range(0, padded, 6):
                        q, target = query + r * dim * 4, line + r * stride * 4
                        score_page(6, dim, page, kv_bf16, q, at, target, stride, 0, 0, 0)
            for r in range(rows):
                seen = min(num_keys, load_i32(positions + (start + r // group) * 4) + 1 - begin)
                line = scores + r * stride * 4
                weigh(line, seen, num_keys, begin, highest + r * 4, totals + r * 4, sums + r * dim * 4, dim)
            for p in range(num_pages):
                at = values + (load_i32(pages + (begin // page + p) * 4) * num_kv_heads + h) * page_bytes
                used = min(page, num_keys - p * page)
                line = scores + p * page * 4
                if few:
                    add_page(few_rows, dim, 4, kv_bf16, line, stride, at, sums, used)
                else:
                    for r in range(0, padded, 6):
                        source, target = line + r * stride * 4, sums + r * dim * 4
                        add_page(6, dim, 4, kv_bf16, source, stride, at, target, used)
        for r in range(rows):
            target = out + ((start + r // group) * num_heads + h * group + r % group) * dim * element
            factor = vsplat(types.float32(1.0) / load_f32(totals + r * 4))
            for i in range(0, dim, 16):
                vstore(target + i * element, vmul(vload(sums + (r * dim + i) * 4, 0), factor), bf16)
        done += 1
    atomic_add(counters + 32, done)


def compile_attention(
    num_heads: int, num_kv_heads: int, dim: int, rotary_dim: int, page: int, bf16: int, kv_bf16: int
) -> Any:
    """The kernel for one geometry; the closure holds integers only, so that numba finds it in its cache again."""
    group = num_heads // num_kv_heads
    kv_element = 2 if kv_bf16 else 4
    keys_per_block = page * max(1, 128 // page)
    stride = (keys_per_block + 15) // 16 * 16
    few_rows = min(group, 6)
    page_bytes = page * dim * kv_element
    slot_bytes = page * kv_element

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def attention(block: Any) -> None:
        attend(
            block, block[0], block[1], block[2], block[3], block[31], num_heads, num_kv_heads, dim, rotary_dim, page,
            bf16, kv_bf16, few_rows, stride, page_bytes, slot_bytes,
        )  # fmt: skip

    return attention


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """The inputs of a step with its tiles: [num_tiles, 3] int32 of request, first token, tokens; longest work first."""

    inputs: AttentionInputs
    geometry: AttentionGeometry
    tiles: np.ndarray[Any, np.dtype[np.int32]]

    def tell(self, block: Any) -> None:
        """Writes to an argument block what `attend` reads of the step: block[4:12]."""
        inputs = self.inputs
        block[4] = inputs.positions.data_ptr()
        block[5] = inputs.slot_mapping.data_ptr()
        block[6] = inputs.rope_table.data_ptr()
        block[7] = inputs.block_table.data_ptr()
        block[8] = inputs.block_table.stride(0)
        block[9] = inputs.positions.shape[0]
        block[10] = self.tiles.ctypes.data
        block[11] = self.tiles.shape[0]


def make_tiles(inputs: AttentionInputs) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Cuts each request's tokens into tiles of at most TILE_TOKENS."""
    bounds = inputs.cu_seqlens_q.numpy()
    lengths = inputs.seq_lens.numpy()
    counts = bounds[1:] - bounds[:-1]
    per_request = -(-counts // TILE_TOKENS)
    request = np.repeat(np.arange(counts.size), per_request)
    index = np.arange(request.size) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    start = bounds[:-1][request] + index * TILE_TOKENS
    count = np.minimum(TILE_TOKENS, bounds[1:][request] - start)
    context = lengths[request] - counts[request] + index * TILE_TOKENS + count
    tiles = np.stack((request, start, count), axis=1)
    return np.ascontiguousarray(tiles[np.argsort(-context * count, kind="stable")], dtype=np.int32)


class PagedAttention:
    """The op for one geometry and pair of dtypes."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self._function = compile_attention(
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.rotary_dim,
            geometry.page_size,
            int(dtype is torch.bfloat16),
            int(kv_dtype is torch.bfloat16),
        )
        self._kernel = Kernel(self._function.address)
        self._geometry = geometry
        self._threads = num_threads()
        size = -(-scratch_size(geometry) // WIDTH) * WIDTH
        self._scratch = torch.zeros((self._threads, size), dtype=torch.float32)
        self._scale = torch.tensor([geometry.scale], dtype=torch.float32)
        block = self._kernel.block
        block[12] = self._scratch.data_ptr()
        block[13] = size * 4
        block[14] = self._scale.data_ptr()
        self._prepared: PreparedAttention | None = None

    def __call__(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: PreparedAttention
    ) -> torch.Tensor:
        """See the reference; keys are stored [page, kv_head, head_dim, slot]."""
        block = self._kernel.block
        if prepared is not self._prepared:
            prepared.tell(block)
            self._prepared = prepared
        out = torch.empty((qkv.shape[0], self._geometry.num_heads * self._geometry.head_dim), dtype=qkv.dtype)
        block[0] = qkv.data_ptr()
        block[1] = out.data_ptr()
        block[2] = keys.data_ptr()
        block[3] = values.data_ptr()
        self._kernel.run(self._threads)
        return out
