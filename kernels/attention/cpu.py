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
from numba import cfunc, types

from kernels.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.attention.micro import add_page, score_page
from kernels.cpu.pool import Kernel, num_threads
from kernels.cpu.simd import (
    WIDTH,
    atomic_add,
    atomic_load,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    vadd,
    vexp,
    vhighest,
    vkeep,
    vload,
    vmax,
    vmul,
    vscatter,
    vsplat,
    vstore,
    vsub,
    vsum,
)

TILE_TOKENS = 16
ROWS = 6  # queries whose products are accumulated in registers together
_KEY_BLOCK = 128
_TOKEN_BLOCK = 8
_LOW = -3.0e38


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


def compile_attention(
    num_heads: int, num_kv_heads: int, dim: int, rotary_dim: int, page: int, bf16: int, kv_bf16: int
) -> Any:
    """The kernel for one geometry; the closure holds integers only, so that numba finds it in its cache again."""
    group = num_heads // num_kv_heads
    half = rotary_dim // 2
    element = 2 if bf16 else 4
    kv_element = 2 if kv_bf16 else 4
    width = (num_heads + 2 * num_kv_heads) * dim
    keys_per_block = page * max(1, 128 // page)
    stride = (keys_per_block + 15) // 16 * 16
    few_rows = min(group, 6)
    max_rows = (16 * group + 5) // 6 * 6
    page_bytes = page * dim * kv_element
    slot_bytes = page * kv_element

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def attention(block: Any) -> None:
        qkv, out, keys, values = block[0], block[1], block[2], block[3]
        positions, slots, rope, table = block[4], block[5], block[6], block[7]
        table_width, num_tokens, tiles, num_tiles = block[8], block[9], block[10], block[11]
        scratch, scratch_bytes, counters = block[12], block[13], block[31]
        scale = vsplat(load_f32(block[14]))
        floor = types.float32(-3.0e38)

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
                    key = keys + target + slot % page * kv_element
                    source = qkv + (token * width + (num_heads + h) * dim) * element
                    for i in range(0, half, 16):
                        x, y = vload(source + i * element, bf16), vload(source + (half + i) * element, bf16)
                        cos, sin = vload(row + i * 4, 0), vload(row + (half + i) * 4, 0)
                        low = vsub(vmul(x, cos), vmul(y, sin))
                        high = vadd(vmul(y, cos), vmul(x, sin))
                        vscatter(key + i * slot_bytes, slot_bytes, low, kv_bf16)
                        vscatter(key + (half + i) * slot_bytes, slot_bytes, high, kv_bf16)
                    for i in range(rotary_dim, dim, 16):
                        x = vload(source + i * element, bf16)
                        vscatter(key + i * slot_bytes, slot_bytes, x, kv_bf16)
                    value = values + target + slot % page * dim * kv_element
                    source += num_kv_heads * dim * element
                    for i in range(0, dim, 16):
                        vstore(value + i * kv_element, vload(source + i * element, bf16), kv_bf16)
            atomic_add(counters + 8, last - first)
        while atomic_load(counters + 8) < num_tokens:
            pass

        query = scratch + atomic_add(counters + 16, 1) * scratch_bytes
        sums = query + max_rows * dim * 4
        scores = sums + max_rows * dim * 4
        # The highest score and the sum of weights so far of each row.
        highest = scores + max_rows * stride * 4
        totals = highest + max_rows * 4
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
            for r in range(padded):
                q = query + r * dim * 4
                for i in range(0, dim, 16):
                    vstore(sums + (r * dim + i) * 4, vsplat(0.0), 0)
                    if r >= rows:
                        vstore(q + i * 4, vsplat(0.0), 0)
                store_f32(highest + r * 4, floor)
                store_f32(totals + r * 4, 0.0)
                if r < rows:
                    token = start + r // group
                    source = qkv + (token * width + (h * group + r % group) * dim) * element
                    row = rope + load_i32(positions + token * 4) * rotary_dim * 4
                    for i in range(0, half, 16):
                        x, y = vload(source + i * element, bf16), vload(source + (half + i) * element, bf16)
                        cos, sin = vload(row + i * 4, 0), vload(row + (half + i) * 4, 0)
                        vstore(q + i * 4, vmul(scale, vsub(vmul(x, cos), vmul(y, sin))), 0)
                        vstore(q + (half + i) * 4, vmul(scale, vadd(vmul(y, cos), vmul(x, sin))), 0)
                    for i in range(rotary_dim, dim, 16):
                        vstore(q + i * 4, vmul(scale, vload(source + i * element, bf16)), 0)

            context = load_i32(positions + (start + count - 1) * 4) + 1
            for begin in range(0, context, keys_per_block):
                num_keys = min(keys_per_block, context - begin)
                num_pages = (num_keys + page - 1) // page
                for p in range(num_pages):
                    at = keys + (load_i32(pages + (begin // page + p) * 4) * num_kv_heads + h) * page_bytes
                    if few:
                        following = load_i32(pages + (begin // page + min(p + 1, num_pages - 1)) * 4)
                        following = keys + (following * num_kv_heads + h) * page_bytes
                        score_page(
                            few_rows, dim, page, kv_bf16, query, at, scores + p * page * 4, stride, 1, following,
                            at - keys + values,
                        )  # fmt: skip
                    else:
                        for r in range(0, padded, 6):
                            score_page(
                                6, dim, page, kv_bf16, query + r * dim * 4, at, scores + (r * stride + p * page) * 4,
                                stride, 0, 0, 0,
                            )  # fmt: skip
                for r in range(rows):
                    seen = min(num_keys, load_i32(positions + (start + r // group) * 4) + 1 - begin)
                    line = scores + r * stride * 4
                    top = vsplat(floor)
                    for i in range(0, num_keys, 16):
                        x = vkeep(vload(line + i * 4, 0), seen - i, floor)
                        vstore(line + i * 4, x, 0)
                        top = vmax(top, x)
                    before = load_f32(highest + r * 4)
                    now = max(before, vhighest(top))
                    store_f32(highest + r * 4, now)
                    shift = vsplat(now)
                    total = vsplat(0.0)
                    for i in range(0, num_keys, 16):
                        x = vexp(vsub(vload(line + i * 4, 0), shift))
                        vstore(line + i * 4, x, 0)
                        total = vadd(total, x)
                    if begin > 0:
                        decay = vexp(vsub(vsplat(before), shift))
                        for i in range(0, dim, 16):
                            cell = sums + (r * dim + i) * 4
                            vstore(cell, vmul(vload(cell, 0), decay), 0)
                        # All lanes of decay are equal.
                        carried = vhighest(decay) * load_f32(totals + r * 4)
                        store_f32(totals + r * 4, carried + vsum(total))
                    else:
                        store_f32(totals + r * 4, vsum(total))
                for p in range(num_pages):
                    at = values + (load_i32(pages + (begin // page + p) * 4) * num_kv_heads + h) * page_bytes
                    used = min(page, num_keys - p * page)
                    if few:
                        add_page(few_rows, dim, 4, kv_bf16, scores + p * page * 4, stride, at, sums, used)
                    else:
                        for r in range(0, padded, 6):
                            add_page(
                                6, dim, 4, kv_bf16, scores + (r * stride + p * page) * 4, stride, at, sums + r * dim * 4, used
                            )
            for r in range(rows):
                target = out + ((start + r // group) * num_heads + h * group + r % group) * dim * element
                factor = vsplat(types.float32(1.0) / load_f32(totals + r * 4))
                for i in range(0, dim, 16):
                    vstore(target + i * element, vmul(vload(sums + (r * dim + i) * 4, 0), factor), bf16)

    return attention


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """The inputs of a step with its tiles: [num_tiles, 3] int32 of request, first token, tokens; longest work first."""

    inputs: AttentionInputs
    geometry: AttentionGeometry
    tiles: np.ndarray[Any, np.dtype[np.int32]]


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
            inputs = prepared.inputs
            block[4] = inputs.positions.data_ptr()
            block[5] = inputs.slot_mapping.data_ptr()
            block[6] = inputs.rope_table.data_ptr()
            block[7] = inputs.block_table.data_ptr()
            block[8] = inputs.block_table.stride(0)
            block[9] = qkv.shape[0]
            block[10] = prepared.tiles.ctypes.data
            block[11] = prepared.tiles.shape[0]
            self._prepared = prepared
        out = torch.empty((qkv.shape[0], self._geometry.num_heads * self._geometry.head_dim), dtype=qkv.dtype)
        block[0] = qkv.data_ptr()
        block[1] = out.data_ptr()
        block[2] = keys.data_ptr()
        block[3] = values.data_ptr()
        self._kernel.run(self._threads)
        return out
