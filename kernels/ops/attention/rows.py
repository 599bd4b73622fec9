"""Operations on one attention row: rotation of keys and queries, and conversion of scores to softmax weights.

dim, rotary_dim, slot_bytes, bf16 and kv_bf16 are literals; addresses are int64.
"""

from __future__ import annotations

from typing import Any

from numba import literally, types
from numba.extending import register_jitable

from kernels.common.cpu.simd import (
    inner,
    load_f32,
    store_f32,
    vadd,
    vdiv,
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
from kernels.ops.attention.micro import vdrop

TILE_TOKENS = 16
"""Number of tokens of a request that one tile contains."""
ROWS = 6
"""Number of queries whose products are accumulated in registers together."""
KEY_BLOCK = 128
"""Number of keys that a tile scores at a time, unless pages are larger."""
HIDDEN = -3.0e38
"""Score of a masked key, and initial shift of a row that has seen no key yet."""


def key_block(page_size: int) -> int:
    """Return the number of keys that a tile scores at a time, a multiple of the page size."""
    return page_size * max(1, KEY_BLOCK // page_size)


def tile_rows(group: int) -> int:
    """Return the number of scratch rows for the queries of a tile, `group` per token: a multiple of ROWS."""
    return (TILE_TOKENS * group + ROWS - 1) // ROWS * ROWS


for _size in (key_block, tile_rows):
    register_jitable(_size)


@inner
def rotated(source: Any, row: Any, i: Any, half: Any, bf16: Any) -> Any:
    """Return two rotated vectors of the head at `source`: 16 dimensions from i on and 16 from half + i on.

    row: address of the rotary table's row for the position.
    """
    literally(bf16)
    element = 2 if bf16 else 4
    x, y = vload(source + i * element, bf16), vload(source + (half + i) * element, bf16)
    cos, sin = vload(row + i * 4, 0), vload(row + (half + i) * 4, 0)
    return vsub(vmul(x, cos), vmul(y, sin)), vadd(vmul(y, cos), vmul(x, sin))


@inner
def write_key(
    source: Any, row: Any, target: Any, dim: Any, rotary_dim: Any, slot_bytes: Any, bf16: Any, kv_bf16: Any
) -> None:
    """Rotate a key by the rotary table's `row` and write it to its slot, whose dimensions are slot_bytes apart."""
    literally(dim)
    literally(rotary_dim)
    literally(slot_bytes)
    literally(bf16)
    literally(kv_bf16)
    element = 2 if bf16 else 4
    half = rotary_dim // 2
    for i in range(0, half, 16):
        x, y = rotated(source, row, i, half, bf16)
        vscatter(target + i * slot_bytes, slot_bytes, x, kv_bf16)
        vscatter(target + (half + i) * slot_bytes, slot_bytes, y, kv_bf16)
    for i in range(rotary_dim, dim, 16):
        vscatter(target + i * slot_bytes, slot_bytes, vload(source + i * element, bf16), kv_bf16)


@inner
def load_query(source: Any, row: Any, target: Any, scale: Any, dim: Any, rotary_dim: Any, bf16: Any) -> None:
    """Rotate a query, multiply it by the scale of the scores and write it to float32 scratch memory."""
    literally(dim)
    literally(rotary_dim)
    literally(bf16)
    element = 2 if bf16 else 4
    half = rotary_dim // 2
    for i in range(0, half, 16):
        x, y = rotated(source, row, i, half, bf16)
        vstore(target + i * 4, vmul(scale, x), 0)
        vstore(target + (half + i) * 4, vmul(scale, y), 0)
    for i in range(rotary_dim, dim, 16):
        vstore(target + i * 4, vmul(scale, vload(source + i * element, bf16)), 0)


@inner
def clear_rows(rows: Any, padded: Any, query: Any, sums: Any, highest: Any, totals: Any, dim: Any) -> None:
    """Initialize the sums of a tile, and set the queries of padding rows to zero."""
    literally(dim)
    for r in range(padded):
        for i in range(0, dim, 16):
            vstore(sums + (r * dim + i) * 4, vsplat(0.0), 0)
            if r >= rows:
                vstore(query + (r * dim + i) * 4, vsplat(0.0), 0)
        store_f32(highest + r * 4, types.float32(HIDDEN))
        store_f32(totals + r * 4, 0.0)


@inner
def cap_scores(line: Any, first: Any, end: Any, limit: Any) -> None:
    """Apply the soft cap: scores x become limit * tanh(x / 2), which is limit * (1 - 2 / (exp(x) + 1))."""
    one, two = vsplat(types.float32(1.0)), vsplat(types.float32(2.0))
    for i in range(first, end, 16):
        x = vdiv(two, vadd(vexp(vload(line + i * 4, 0)), one))
        vstore(line + i * 4, vmul(vsplat(limit), vsub(one, x)), 0)


@inner
def hide(line: Any, low: Any, seen: Any, first: Any, end: Any) -> None:
    """Mask the scores first <= k < end of a row outside low <= k < seen, and the rest of the last 16.

    first is a multiple of 16; seen is at most end.
    """
    hidden = types.float32(HIDDEN)
    for i in range(first, min(low, end), 16):
        vstore(line + i * 4, vdrop(vload(line + i * 4, 0), low - i, hidden), 0)
    for i in range(max(first, seen // 16 * 16), end, 16):
        vstore(line + i * 4, vkeep(vload(line + i * 4, 0), seen - i, hidden), 0)


@inner
def weigh(
    line: Any, low: Any, seen: Any, first: Any, num_keys: Any, highest: Any, total: Any, sums: Any, dim: Any
) -> None:
    """Convert scores first <= k < num_keys to exp(score - highest so far), or 0 outside low <= k < seen.

    first is a multiple of 16. Updates the highest score and the sum of weights, and scales down the previous sums.
    """
    literally(dim)
    hide(line, low, seen, first, num_keys)
    top = vsplat(types.float32(HIDDEN))
    for i in range(first, num_keys, 16):
        top = vmax(top, vload(line + i * 4, 0))
    before = load_f32(highest)
    now = max(before, vhighest(top))
    store_f32(highest, now)
    # Before the first visible key, the shift is still the score of masked keys.
    shift = vsplat(max(now, types.float32(-1.0e38)))
    added = vsplat(types.float32(0.0))
    for i in range(first, num_keys, 16):
        x = vexp(vsub(vload(line + i * 4, 0), shift))
        vstore(line + i * 4, x, 0)
        added = vadd(added, x)
    if before > types.float32(HIDDEN):
        decay = vexp(vsub(vsplat(before), shift))
        for i in range(0, dim, 16):
            vstore(sums + i * 4, vmul(vload(sums + i * 4, 0), decay), 0)
        store_f32(total, vhighest(decay) * load_f32(total) + vsum(added))
    else:
        store_f32(total, vsum(added))
