"""Device functions of the kernels that compute partial attention over a range of keys and merge the results.

The decode and the cascade kernels use them. A partial result of a query is (m, total, acc): the largest score m in
units of log2, the sum of the weights exp2(score - m), and acc, the sum of weight * value (Milakov and Gimelshein
2018). A result without keys has m = -inf and zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.triton.arithmetic import LOG2_E, rounded, scaled_scores
from kernels.common.triton.formats import decode_cells, decode_int4_high, decode_int4_low


@triton.jit
def finite(m):
    """Return m, or 0 where m is -inf, so that subtracting it from -inf does not give NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def load_queries(p_row, valid, HEAD: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, PRODUCT: tl.constexpr):
    """Load rows of queries as PRODUCT: the whole head and an unused tile, or for int4 the two halves of each head.

    p_row: [ROWS] pointers; invalid rows are loaded as zeros. WIDTH: width of a cell, padded to a power of two.
    """
    CELL: tl.constexpr = HEAD // 2 if FORMAT == "int4" else HEAD
    o_dim = tl.arange(0, WIDTH)
    mask = valid[:, None] & (o_dim < CELL)[None, :]
    low = tl.load(p_row[:, None] + o_dim[None, :], mask=mask, other=0.0).to(PRODUCT)
    high = low
    if FORMAT == "int4":
        high = tl.load(p_row[:, None] + CELL + o_dim[None, :], mask=mask, other=0.0).to(PRODUCT)
    return low, high


@triton.jit
def attend_keys(
    b_queries,
    begin,
    end,
    row_begin,
    row_end,
    p_table,
    p_keys,
    p_values,
    p_key_scales,
    p_value_scales,
    scale,
    softcap,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HIGH_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Compute partial results of ROWS queries over keys begin .. end - 1, in tiles of KEYS keys starting at `begin`.

    b_queries: result of load_queries. row_begin, row_end: [ROWS] range of keys visible to each row; row_begin is used
    only if HAS_WINDOW. p_table: the request's row of the block table. p_keys, p_values, p_key_scales, p_value_scales:
    pointers to this KV head in page 0; the scales of dense cells are not read. PRODUCT, WEIGHT: types of the two
    products (kernels/ops/attention/triton_cells.py). HIGH_WIDTH: WIDTH for int4, otherwise any valid width of a tile,
    which stays unchanged.

    Returns:
        m, total: [ROWS].
        acc: [ROWS, WIDTH], and [ROWS, HIGH_WIDTH] for the high halves of int4.
    """
    b_low, b_high = b_queries
    CELL: tl.constexpr = HEAD // 2 if FORMAT == "int4" else HEAD
    o_dim = tl.arange(0, WIDTH)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    acc_high = tl.zeros([ROWS, HIGH_WIDTH], dtype=tl.float32)
    for first in range(begin, end, KEYS):
        o_key = first + tl.arange(0, KEYS)
        inside = o_key < end
        page = tl.load(p_table + o_key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        slot = o_key % PAGE_SIZE
        mask = inside[:, None] & (o_dim < CELL)[None, :]
        p_key = p_keys + (page * KEY_STRIDES[0] + slot * KEY_STRIDES[2])[:, None] + o_dim[None, :] * KEY_STRIDES[3]
        key = tl.load(p_key, mask=mask, other=0.0)
        if FORMAT == "int4":
            products = tl.dot(b_low, tl.trans(decode_int4_low(key, PRODUCT)), input_precision="ieee")
            products = tl.dot(b_high, tl.trans(decode_int4_high(key, PRODUCT)), products, input_precision="ieee")
        else:
            cells = decode_cells(key, FORMAT, NATIVE, PRODUCT)
            products = tl.dot(b_low, tl.trans(cells), input_precision="ieee", out_dtype=tl.float32)
        if FORMAT != "dense":
            o_scale = page * SCALE_STRIDES[0] + slot * SCALE_STRIDES[2]
            products *= tl.load(p_key_scales + o_scale, mask=inside, other=0.0)[None, :]
        scores = scaled_scores(products, scale, softcap, HAS_SOFTCAP)
        seen = o_key[None, :] < row_end[:, None]
        if HAS_WINDOW:
            seen = seen & (o_key[None, :] >= row_begin[:, None])
        scores = tl.where(seen, scores, float("-inf"))

        largest = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - finite(largest)[:, None])
        kept = tl.exp2(m - finite(largest))
        m = largest
        total = total * kept + tl.sum(weights, axis=1)
        acc *= kept[:, None]
        p_value = (
            p_values + (page * VALUE_STRIDES[0] + slot * VALUE_STRIDES[2])[:, None] + o_dim[None, :] * VALUE_STRIDES[3]
        )
        value = tl.load(p_value, mask=mask, other=0.0)
        if FORMAT != "dense":
            weights *= tl.load(p_value_scales + o_scale, mask=inside, other=0.0)[None, :]
        weights = weights.to(WEIGHT)
        if FORMAT == "int4":
            acc_high *= kept[:, None]
            acc = tl.dot(weights, decode_int4_low(value, WEIGHT), acc, input_precision="ieee")
            acc_high = tl.dot(weights, decode_int4_high(value, WEIGHT), acc_high, input_precision="ieee")
        else:
            acc = tl.dot(weights, decode_cells(value, FORMAT, NATIVE, WEIGHT), acc, input_precision="ieee")
    return m, total, acc, acc_high


@triton.jit
def merge_weights(m, other):
    """Return the maximum of two largest scores and the factor by which each side is scaled."""
    largest = tl.maximum(m, other)
    return largest, tl.exp2(m - finite(largest)), tl.exp2(other - finite(largest))


@triton.jit
def normalizer(m, total, p_sinks, head, valid, HAS_SINKS: tl.constexpr):
    """Return the final factor of acc, 1 / total, where the total includes the head's sink."""
    if HAS_SINKS:
        sink = tl.load(p_sinks + head, mask=valid, other=float("-inf")) * LOG2_E
        _, kept, added = merge_weights(m, sink)
        return kept / tl.where(valid, total * kept + added, 1.0)
    return 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def store_rows(p_row, values, high, valid, HEAD: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Store rows of results [ROWS, WIDTH] to [ROWS] pointers, and for int4 the results of the high halves as well."""
    CELL: tl.constexpr = HEAD // 2 if FORMAT == "int4" else HEAD
    o_dim = tl.arange(0, WIDTH)
    mask = valid[:, None] & (o_dim < CELL)[None, :]
    p_values = p_row[:, None] + o_dim[None, :]
    tl.store(p_values, rounded(values, p_row.dtype.element_ty), mask=mask)
    if FORMAT == "int4":
        tl.store(p_values + CELL, rounded(high, p_row.dtype.element_ty), mask=mask)
