"""Attention over pages of single cells, float32 or bfloat16, in float32 arithmetic.

All arguments from num_heads on are literals; addresses are int64.
"""

from __future__ import annotations

from typing import Any

from numba import literally, types

from kernels.common.cpu.simd import inner, load_f32, load_i32, vexp, vload, vmul, vscatter, vsplat, vstore
from kernels.ops.attention.micro import ROWS, add_page, key_block, line_values, score_page
from kernels.ops.attention.rows import clear_rows, key_writer, query_loader, soft_cap, tile_rows, weigh

write_key = key_writer(vscatter)
_cap_scores = soft_cap(vexp)


@inner
def _store(address: Any, values: Any) -> None:
    vstore(address, values, 0)


_load_query = query_loader(_store, 4)


@inner
def attend_to_cells(
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
    kv_bf16: Any,
) -> None:
    """Compute one tile for KV head h: `count` tokens, starting at `start`, of the request with block table `pages`."""
    literally(num_kv_heads)
    literally(num_heads)
    literally(dim)
    literally(rotary_dim)
    literally(page)
    literally(bf16)
    literally(kv_bf16)
    element = 2 if bf16 else 4
    group = num_heads // num_kv_heads
    width = (num_heads + 2 * num_kv_heads) * dim
    max_rows = tile_rows(group)
    keys_per_block, stride = key_block(page), line_values(page)
    page_bytes = page * dim * (2 if kv_bf16 else 4)
    query = scratch
    sums = query + max_rows * dim * 4
    scores = sums + max_rows * dim * 4
    highest = scores + max_rows * stride * 4
    totals = highest + max_rows * 4
    rows = count * group
    few = count == 1 and group <= ROWS
    padded = rows if few else (rows + ROWS - 1) // ROWS * ROWS
    factor = scale
    if softcap > types.float32(0.0):
        factor = scale * types.float32(2.0) / softcap
    clear_rows(rows, padded, query, sums, highest, totals, dim)
    for r in range(rows):
        token = start + r // group
        source = qkv + (token * width + (h * group + r % group) * dim) * element
        row = rope + load_i32(positions + token * 4) * rotary_dim * 4
        _load_query(source, row, query + r * dim * 4, vsplat(factor), dim, rotary_dim, bf16)

    context = load_i32(positions + (start + count - 1) * 4) + 1
    lowest = max(0, load_i32(positions + start * 4) + 1 - window)
    for begin in range(lowest // keys_per_block * keys_per_block, context, keys_per_block):
        num_keys = min(keys_per_block, context - begin)
        num_pages = (num_keys + page - 1) // page
        low_page = max(0, lowest - begin) // page
        first = low_page * page // 16 * 16
        for p in range(low_page, num_pages):
            at = keys + (load_i32(pages + (begin // page + p) * 4) * num_kv_heads + h) * page_bytes
            line = scores + p * page * 4
            if few:
                after = load_i32(pages + (begin // page + min(p + 1, num_pages - 1)) * 4)
                after = keys + (after * num_kv_heads + h) * page_bytes
                score_page(1, num_heads, num_kv_heads, dim, page, kv_bf16, query, at, line, after, at - keys + values)
            else:
                for r in range(0, padded, ROWS):
                    q, target = query + r * dim * 4, line + r * stride * 4
                    score_page(0, num_heads, num_kv_heads, dim, page, kv_bf16, q, at, target, 0, 0)
        for r in range(rows):
            seen = load_i32(positions + (start + r // group) * 4) + 1 - begin
            line = scores + r * stride * 4
            if softcap > types.float32(0.0):
                _cap_scores(line, first, num_keys, softcap)
            weigh(
                line, seen - window, min(seen, num_keys), first, num_keys, highest + r * 4, totals + r * 4,
                sums + r * dim * 4, dim,
            )  # fmt: skip
        for p in range(low_page, num_pages):
            at = values + (load_i32(pages + (begin // page + p) * 4) * num_kv_heads + h) * page_bytes
            used = min(page, num_keys - p * page)
            line = scores + p * page * 4
            if few:
                add_page(1, num_heads, num_kv_heads, dim, page, kv_bf16, line, at, sums, used)
            else:
                for r in range(0, padded, ROWS):
                    source, target = line + r * stride * 4, sums + r * dim * 4
                    add_page(0, num_heads, num_kv_heads, dim, page, kv_bf16, source, at, target, used)
    for r in range(rows):
        target = out + ((start + r // group) * num_heads + h * group + r % group) * dim * element
        share = vsplat(types.float32(1.0) / load_f32(totals + r * 4))
        for i in range(0, dim, 16):
            vstore(target + i * element, vmul(vload(sums + (r * dim + i) * 4, 0), share), bf16)
