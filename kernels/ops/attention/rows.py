"""Operations on one attention row: rotation of keys and queries, and conversion of scores to softmax weights.

dim, rotary_dim, page, bf16 and kv_bf16 are literals; addresses are int64. Functions that return functions serve both
kinds of pages (kernels/ops/attention/kv_pages.py).
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
    vdrop,
    vexp,
    vhighest,
    vkeep,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from kernels.ops.attention.micro import ROWS

TILE_TOKENS = 16
"""Number of tokens of a request that one tile contains."""
HIDDEN = -3.0e38
"""Score of a masked key, and initial shift of a row that has seen no key yet."""


def tile_rows(group: int) -> int:
    """Return the number of scratch rows for the queries of a tile, `group` per token: a multiple of ROWS."""
    return (TILE_TOKENS * group + ROWS - 1) // ROWS * ROWS


register_jitable(tile_rows)


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


def key_writer(scatter: Any) -> Any:
    """Return a function that rotates a key by the rotary table's `row` and writes it to its slot.

    `scatter` has the arguments of `vscatter`.
    """

    @inner
    def write_key(
        source: Any, row: Any, target: Any, dim: Any, rotary_dim: Any, page: Any, bf16: Any, kv_bf16: Any
    ) -> None:
        literally(dim)
        literally(rotary_dim)
        literally(page)
        literally(bf16)
        literally(kv_bf16)
        element = 2 if bf16 else 4
        step = page * (2 if kv_bf16 else 4)
        half = rotary_dim // 2
        for i in range(0, half, 16):
            x, y = rotated(source, row, i, half, bf16)
            scatter(page, kv_bf16, target + i * step, x)
            scatter(page, kv_bf16, target + (half + i) * step, y)
        for i in range(rotary_dim, dim, 16):
            scatter(page, kv_bf16, target + i * step, vload(source + i * element, bf16))

    return write_key


def query_loader(store: Any, size: int) -> Any:
    """Return a function that rotates a query, scales it and writes it to scratch memory.

    `store` has an address and a vector as arguments and writes values of `size` bytes.
    """

    @inner
    def load_query(source: Any, row: Any, target: Any, scale: Any, dim: Any, rotary_dim: Any, bf16: Any) -> None:
        literally(dim)
        literally(rotary_dim)
        literally(bf16)
        element = 2 if bf16 else 4
        half = rotary_dim // 2
        for i in range(0, half, 16):
            x, y = rotated(source, row, i, half, bf16)
            store(target + i * size, vmul(scale, x))
            store(target + (half + i) * size, vmul(scale, y))
        for i in range(rotary_dim, dim, 16):
            store(target + i * size, vmul(scale, vload(source + i * element, bf16)))

    return load_query


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


def soft_cap(power: Any) -> Any:
    """Return a function that replaces scores x by limit * tanh(x / 2) = limit * (1 - 2 / (power(x) + 1)).

    `power` is exp, or 2 to the power of its argument if x is in units of log 2.
    """

    @inner
    def cap_scores(line: Any, first: Any, end: Any, limit: Any) -> None:
        one, two = vsplat(types.float32(1.0)), vsplat(types.float32(2.0))
        for i in range(first, end, 16):
            x = vdiv(two, vadd(power(vload(line + i * 4, 0)), one))
            vstore(line + i * 4, vmul(vsplat(limit), vsub(one, x)), 0)

    return cap_scores


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
