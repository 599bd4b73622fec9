"""Attention over bfloat16 pages stored in pairs (kernels/ops/attention/kv_pages.py), with AVX512-BF16.

Queries are rounded to bfloat16 after rotation and scaling, and softmax weights before they multiply values; every sum
is float32. Scores are in units of log 2, so that weights are powers of two. Sizes, numbers of heads and bf16 are
literals; addresses are int64.
"""

from __future__ import annotations

from typing import Any

from numba import literally, types

from kernels.common.cpu.simd import (
    inner,
    load_f32,
    load_i32,
    store_f32,
    vload,
    vmul,
    vsplat,
    vstore,
    vsum,
)
from kernels.ops.attention.micro import ROWS, key_block
from kernels.ops.attention.micro_pairs import (
    MAX_FEW_QUERIES,
    add_pairs,
    line_keys,
    scatter_pairs,
    score_pairs,
    store_half,
    store_rounded,
)
from kernels.ops.attention.rows import HIDDEN, hide, key_writer, query_loader, soft_cap, tile_rows
from kernels.ops.attention.weights import highest_score, rows_above, vexp2, weigh_rows

write_paired_key = key_writer(scatter_pairs)
_load_query = query_loader(store_rounded, 2)
_cap = soft_cap(vexp2)


@inner
def write_paired_value(source: Any, target: Any, slot: Any, dim: Any, bf16: Any) -> None:
    """Write a value to its slot of the page at `target`."""
    literally(dim)
    literally(bf16)
    element = 2 if bf16 else 4
    for i in range(0, dim, 16):
        store_half(target + (slot // 2 * dim + i) * 4, vload(source + i * element, bf16), slot % 2)


@inner
def _raise_shift(line: Any, first: Any, end: Any, shift: Any, total: Any, sums: Any, dim: Any) -> None:
    """Raise the shift of a row to its highest score so far and scale down the previous sums."""
    literally(dim)
    highest = highest_score(line, first, end)
    # The shift of a row without keys so far is so low that the difference may not be finite.
    decay = vexp2(vsplat(max(load_f32(shift) - highest, types.float32(-200.0))))
    store_f32(shift, highest)
    vstore(total, vmul(vload(total, 0), decay), 0)
    for i in range(0, dim, 16):
        vstore(sums + i * 4, vmul(vload(sums + i * 4, 0), decay), 0)


@inner
def attend_to_pairs(
    qkv: Any,
    out: Any,
    keys: Any,
    values: Any,
    positions: Any,
    rope: Any,
    pages: Any,
    scratch: Any,
    start: Any,
    count: Any,
    h: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    num_heads: Any,
    num_kv_heads: Any,
    dim: Any,
    rotary_dim: Any,
    page: Any,
    bf16: Any,
) -> None:
    """Compute one tile for KV head h: `count` tokens, starting at `start`, of the request with block table `pages`."""
    literally(num_kv_heads)
    literally(num_heads)
    literally(dim)
    literally(rotary_dim)
    literally(page)
    literally(bf16)
    element = 2 if bf16 else 4
    group = num_heads // num_kv_heads
    width = (num_heads + 2 * num_kv_heads) * dim
    max_rows = tile_rows(group) + MAX_FEW_QUERIES
    block_keys = key_block(page)
    line_bytes = line_keys(page) * 4
    log2e = types.float32(1.4426950408889634)

    query = scratch
    sums = query + max_rows * dim * 2
    totals = sums + max_rows * dim * 4
    shifts = totals + max_rows * 64
    lines = shifts + max_rows * 64
    rows = count * group
    few = count == 1 and group <= MAX_FEW_QUERIES
    at_once = group if few else ROWS
    factor = scale * log2e
    if softcap > types.float32(0.0):
        factor = factor * types.float32(2.0) / softcap
    for r in range(rows):
        token = start + r // group
        source = qkv + (token * width + (h * group + r % group) * dim) * element
        row = rope + load_i32(positions + token * 4) * rotary_dim * 4
        _load_query(source, row, query + r * dim * 2, vsplat(factor), dim, rotary_dim, bf16)
        for i in range(0, dim, 16):
            vstore(sums + (r * dim + i) * 4, vsplat(types.float32(0.0)), 0)
        vstore(totals + r * 64, vsplat(types.float32(0.0)), 0)
        store_f32(shifts + r * 4, types.float32(HIDDEN))

    head_bytes = page * dim * 2
    head_keys, head_values = keys + h * head_bytes, values + h * head_bytes
    context = load_i32(positions + (start + count - 1) * 4) + 1
    lowest = max(0, load_i32(positions + start * 4) + 1 - window)
    for begin in range(lowest // block_keys * block_keys, context, block_keys):
        table = pages + begin // page * 4
        final = (context - 1 - begin) // page
        for r in range(0, rows, at_once):
            until = min(r + at_once, rows)
            # Keys of the block visible to its first row, which sees the fewest, and keys visible to its last row.
            least = load_i32(positions + (start + r // group) * 4) + 1 - begin
            most = load_i32(positions + (start + (until - 1) // group) * 4) + 1 - begin
            num_keys = min(block_keys, most)
            low = max(0, least - window)
            if low >= num_keys:
                continue
            low_page, last_page = low // page, (num_keys - 1) // page
            first, end = low_page * page // 32 * 32, (num_keys + 31) // 32 * 32
            q, target = query + r * dim * 2, sums + r * dim * 4
            if few:
                score_pairs(
                    1, num_heads, num_kv_heads, dim, page, q, head_keys, table, lines, first, end, low_page, last_page,
                    final, values - keys,
                )  # fmt: skip
            else:
                score_pairs(
                    0, num_heads, num_kv_heads, dim, page, q, head_keys, table, lines, first, end, low_page, last_page,
                    0, 0,
                )  # fmt: skip
            if softcap > types.float32(0.0):
                for k in range(until - r):
                    _cap(lines + k * line_bytes, first, end, softcap * log2e)
            if min(least, num_keys) < end or most - window > first:
                for k in range(r, until):
                    seen = load_i32(positions + (start + k // group) * 4) + 1 - begin
                    hide(lines + (k - r) * line_bytes, seen - window, min(seen, num_keys), first, end)
            if few:
                above = rows_above(1, num_heads, num_kv_heads, dim, page, lines, first, end, shifts + r * 4)
            else:
                above = rows_above(0, num_heads, num_kv_heads, dim, page, lines, first, end, shifts + r * 4)
            if above != 0:
                for k in range(r, until):
                    if above >> (k - r) & 1:
                        line = lines + (k - r) * line_bytes
                        _raise_shift(line, first, end, shifts + k * 4, totals + k * 64, sums + k * dim * 4, dim)
            if few:
                weigh_rows(1, num_heads, num_kv_heads, dim, page, lines, first, end, shifts + r * 4, totals + r * 64)
            else:
                weigh_rows(0, num_heads, num_kv_heads, dim, page, lines, first, end, shifts + r * 4, totals + r * 64)
            if few:
                add_pairs(1, num_heads, num_kv_heads, dim, page, lines, head_values, table, target, low_page, num_keys)
            else:
                add_pairs(0, num_heads, num_kv_heads, dim, page, lines, head_values, table, target, low_page, num_keys)
    for r in range(rows):
        target = out + ((start + r // group) * num_heads + h * group + r % group) * dim * element
        share = vsplat(types.float32(1.0) / vsum(vload(totals + r * 64, 0)))
        for i in range(0, dim, 16):
            vstore(target + i * element, vmul(vload(sums + (r * dim + i) * 4, 0), share), bf16)
