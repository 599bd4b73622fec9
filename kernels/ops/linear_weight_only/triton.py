"""Activations times integer weights: kernels, tile table and launcher.

README.md has the mathematics, layout and roofline.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import Compilation, Product, Target
from kernels.common.triton.integer_codes import CODE_BLOCK, CODE_STEP, USES_ASSEMBLY, decode_integers, group_of_slot
from kernels.common.triton.launch import NAMED_TYPES, Variant, product_type
from kernels.ops.weight_values.layout import PackedWeight, group_constant
from kernels.ops.weight_values.triton import COMPILED_PRODUCTS, values_of

_VARYING = ["num_rows", "num_blocks", "split_blocks"]
"""Arguments that differ between batches and layers and help the compiler with nothing: one variant serves all values.
"""


@triton.jit
def _store_split(
    total, b_bias, o_out, inside, p_partials, p_counter, p_out, num_rows, num_out, i_split, AXIS: tl.constexpr
):
    """Write a split's sums to p_partials [splits, rows, out]; the last program of a tile adds them in their order.

    p_counter counts the tile's programs that have written; it is 0 before and after. AXIS is the grid's axis of
    splits.
    """
    size = tl.cast(num_rows, tl.int64) * num_out
    num_splits = tl.num_programs(AXIS)
    tl.store(p_partials + i_split * size + o_out, total, mask=inside)
    tl.debug_barrier()  # all threads have written before one of them increments the counter
    before = tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")
    if before == num_splits - 1:
        whole = tl.zeros_like(total)
        for i in tl.range(0, num_splits):
            whole += tl.load(p_partials + i * size + o_out, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(p_out + o_out, rounded(whole + b_bias, p_out.dtype.element_ty), mask=inside)
        tl.store(p_counter, 0)


@triton.jit(do_not_specialize=_VARYING)
def few_rows_kernel(
    p_x,
    p_words,
    p_scales,
    p_minimums,
    p_bias,
    p_partials,
    p_counters,
    p_out,
    num_rows,
    num_out,
    num_in,
    stride_x,
    num_blocks,
    split_blocks,
    group_blocks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute a tile [BLOCK_M, BLOCK_N] of one split of the inputs (SPLIT), or of all splits in turn (NESTED).

    Codes are multiplied as integers and scaled afterwards, group by group: acc += (x @ codes) * scale + sum(x) *
    minimum.
    """
    WORDS: tl.constexpr = CODE_STEP if BITS == 4 else CODE_BLOCK  # elements of an output feature and a block
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_step = tl.arange(0, CODE_STEP)
    i_split = tl.program_id(1)
    in_m = o_m < num_rows
    in_n = o_n < num_out
    p_row = p_x + o_m.to(tl.int64)[:, None] * stride_x
    p_tile = p_words + o_n[None, :] * WORDS + o_step[:, None]
    splits = tl.cdiv(num_blocks, split_blocks) if NESTED else 1
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_turn in tl.range(0, splits):
        # Computed in each turn, not carried over from the previous one: Triton 3.6 drops a value that an outer loop
        # carries if only the bounds of an inner loop read it.
        first = (i_split + i_turn) * split_blocks
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i_block in tl.range(first, tl.minimum(first + split_blocks, num_blocks)):
            p_block = p_tile + tl.cast(i_block, tl.int64) * num_out * WORDS
            if BITS == 4:
                b_words = tl.load(p_block, mask=in_n[None, :], other=0)
            b_dot = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            b_sum = tl.zeros((BLOCK_M, CODE_STEP), dtype=tl.float32)
            for SLOT in tl.static_range(CODE_BLOCK // CODE_STEP):
                if BITS == 8:
                    b_words = tl.load(p_block + SLOT * CODE_STEP, mask=in_n[None, :], other=0)
                o_k = i_block * CODE_BLOCK + SLOT * CODE_STEP + o_step
                b_x = tl.load(p_row + o_k[None, :], mask=in_m[:, None] & (o_k < num_in)[None, :], other=0.0)
                b_codes = decode_integers(b_words, SLOT, BITS, PRODUCT, ASM)
                b_dot = tl.dot(b_x.to(PRODUCT), b_codes, b_dot, input_precision="ieee", out_dtype=tl.float32)
                if HAS_MINIMUM:
                    b_sum += b_x.to(tl.float32)
                if ((SLOT + 1) * CODE_STEP) % GROUP == 0 or SLOT == CODE_BLOCK // CODE_STEP - 1:
                    o_group = group_of_slot(i_block, SLOT, group_blocks, GROUP) * num_out + o_n
                    b_scale = tl.load(p_scales + o_group, mask=in_n, other=0.0).to(tl.float32)
                    acc += b_dot * b_scale[None, :]
                    b_dot = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                    if HAS_MINIMUM:
                        b_minimum = tl.load(p_minimums + o_group, mask=in_n, other=0.0).to(tl.float32)
                        acc += tl.sum(b_sum, axis=1)[:, None] * b_minimum[None, :]
                        b_sum = tl.zeros((BLOCK_M, CODE_STEP), dtype=tl.float32)
        total += acc
    o_out = o_m.to(tl.int64)[:, None] * num_out + o_n[None, :]
    inside = in_m[:, None] & in_n[None, :]
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    else:
        b_bias = 0.0
    if SPLIT:
        _store_split(
            total,
            b_bias,
            o_out,
            inside,
            p_partials,
            p_counters + tl.program_id(0),
            p_out,
            num_rows,
            num_out,
            i_split,
            1,
        )
    else:
        tl.store(p_out + o_out, rounded(total + b_bias, p_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def many_rows_kernel(
    p_x,
    p_words,
    p_scales,
    p_minimums,
    p_bias,
    p_partials,
    p_counters,
    p_out,
    num_rows,
    num_out,
    num_in,
    stride_x,
    num_blocks,
    split_blocks,
    group_blocks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute a tile [BLOCK_N, BLOCK_M] of the transposed result.

    Weights are the left operand, which stays in registers.

    With one scale for a block or more, codes are multiplied as integers. Otherwise each weight is computed in float32
    and rounded once to PRODUCT.
    """
    WORDS: tl.constexpr = CODE_STEP if BITS == 4 else CODE_BLOCK
    ASM_HERE: tl.constexpr = ASM and BITS == 4  # a left operand's bytes are not adjacent in a register
    WIDE: tl.constexpr = tl.float32 if BITS == 8 else PRODUCT  # type of the codes before float32
    SCALE_AFTER: tl.constexpr = GROUP == CODE_BLOCK and not HAS_MINIMUM
    # Consecutive programs read the same weights and different rows, so that the weights come from the second-level
    # cache.
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_split = tl.program_id(2)
    o_step = tl.arange(0, CODE_STEP)
    in_m = o_m < num_rows
    in_n = o_n < num_out
    p_row = p_x + o_m.to(tl.int64)[None, :] * stride_x
    p_tile = p_words + o_n[:, None] * WORDS + o_step[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first = i_split * split_blocks
    for i_block in tl.range(first, tl.minimum(first + split_blocks, num_blocks)):
        p_block = p_tile + tl.cast(i_block, tl.int64) * num_out * WORDS
        if BITS == 4:
            b_words = tl.load(p_block, mask=in_n[:, None], other=0)
        if SCALE_AFTER:
            b_dot = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            b_dot = acc
        for SLOT in tl.static_range(CODE_BLOCK // CODE_STEP):
            if BITS == 8:
                b_words = tl.load(p_block + SLOT * CODE_STEP, mask=in_n[:, None], other=0)
            o_k = i_block * CODE_BLOCK + SLOT * CODE_STEP + o_step
            b_x = tl.load(p_row + o_k[:, None], mask=in_m[None, :] & (o_k < num_in)[:, None], other=0.0)
            if SCALE_AFTER:
                b_weight = decode_integers(b_words, SLOT, BITS, PRODUCT, ASM_HERE)
            else:
                o_group = group_of_slot(i_block, SLOT, group_blocks, GROUP) * num_out + o_n
                b_scale = tl.load(p_scales + o_group, mask=in_n, other=0.0).to(tl.float32)
                b_wide = decode_integers(b_words, SLOT, BITS, WIDE, ASM_HERE).to(tl.float32) * b_scale[:, None]
                if HAS_MINIMUM:
                    b_minimum = tl.load(p_minimums + o_group, mask=in_n, other=0.0).to(tl.float32)
                    b_wide += b_minimum[:, None]
                b_weight = b_wide.to(PRODUCT)
            b_dot = tl.dot(b_weight, b_x.to(PRODUCT), b_dot, input_precision="ieee", out_dtype=tl.float32)
        if SCALE_AFTER:
            o_group = group_of_slot(i_block, 0, group_blocks, GROUP) * num_out + o_n
            b_scale = tl.load(p_scales + o_group, mask=in_n, other=0.0).to(tl.float32)
            acc += b_dot * b_scale[:, None]
        else:
            acc = b_dot
    o_out = o_m.to(tl.int64)[None, :] * num_out + o_n[:, None]
    inside = in_m[None, :] & in_n[:, None]
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    else:
        b_bias = 0.0
    if SPLIT:
        _store_split(
            acc, b_bias, o_out, inside, p_partials, p_counters + tl.program_id(1), p_out, num_rows, num_out, i_split, 2
        )
    else:
        tl.store(p_out + o_out, rounded(acc + b_bias, p_out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """Division of a product; rows are those of the activations, columns the output features.

    Attributes:
        few: few_rows_kernel computes it.
        split_for: Wanted number of programs; the inputs are split until there are as many.
    """

    few: bool
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    split_for: int


_MIN_SPLIT_BLOCKS = 4
_FIXED_ROWS = 32
# From this number on it is cheaper to write the weight's values once and multiply them with the vendor's product. On an
# H200 the kernel takes about 0.9 us per row and gate-up layer with minimums; writing the values takes 0.1 ms, and the
# vendor's product 0.35 us per row.
_VALUES_ROWS = 256
_VALUES_BYTES = 1 << 26  # output features of a weight whose values are written at once
_VALUES_TILE = 64


def tile(num_rows: int, bits: int, fixed: bool, amd: bool) -> Tile:
    """Return the entry of the tile table. fixed: one tile for any number of rows."""
    if fixed or num_rows <= 32:
        # Many small programs, all that an H200 holds at once (1188 and 792), because an instruction waits for the one
        # before it and only other warps fill the time. 256 programs of two warps took five times as long as the memory.
        stages = 2 if amd else 4
        if num_rows <= 16 and not fixed:
            return Tile(True, 16, 64, 4, stages, split_for=800)
        return Tile(True, _FIXED_ROWS, 64, 4, stages, split_for=400)
    if num_rows <= 64:
        return Tile(False, 64, 64, 4, 2 if amd else 4, split_for=132)
    return Tile(False, 64 if amd else 128, 128, 8, 2 if amd else 3, split_for=132)


def split_blocks(num_blocks: int, column_tiles: int, wanted: int) -> int:
    """Return the number of blocks of a split of the inputs, which depends only on the weight's shape."""
    splits = 1
    while column_tiles * splits < wanted and num_blocks >= 2 * splits * _MIN_SPLIT_BLOCKS:
        splits *= 2
    return -(-num_blocks // splits)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, fixed: bool = False) -> torch.Tensor:
    """Compute x @ weight.T + bias, accumulated in float32.

    Args:
        x: [T, in] bfloat16 or float16; rows may have any stride.
        weight: The weight.
        bias: [out] of x's dtype, or None.
        fixed: The result of a row does not depend on the other rows or their number.

    Returns:
        [T, out] of x's dtype.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together.
    """
    _check(x, weight, bias)
    num_rows, num_out, num_blocks = x.shape[0], weight.num_out, weight.words.shape[0]
    out = x.new_empty((num_rows, num_out))
    if num_rows == 0 or num_out == 0:
        return out
    if num_rows >= _VALUES_ROWS and not fixed:
        return _by_values(x, weight, bias, out)
    amd = torch.version.hip is not None
    chosen = tile(num_rows, weight.bits, fixed, amd)
    column_tiles = -(-num_out // chosen.columns)
    row_tiles = -(-num_rows // chosen.rows)
    # With several tiles of rows there are enough programs, and partial sums would be large.
    per_split = split_blocks(num_blocks, column_tiles, chosen.split_for if row_tiles == 1 or fixed else 1)
    nested = fixed and row_tiles > 1
    splits = 1 if nested else -(-num_blocks // per_split)
    partials = out if splits == 1 else x.new_empty((splits, num_rows, num_out), dtype=torch.float32)
    grid = (column_tiles, splits, row_tiles) if chosen.few else (row_tiles, column_tiles, splits)
    has_minimum, has_bias = weight.minimums is not None, bias is not None
    traits = Traits(weight.bits, weight.group, has_minimum, has_bias, splits > 1, nested)
    variant = _variant(chosen, traits, x.dtype)
    variant(
        grid,
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.minimums is None else weight.minimums,
        out if bias is None else bias,
        partials,
        weight.counters,
        out,
        num_rows,
        num_out,
        weight.num_in,
        x.stride(0),
        num_blocks,
        per_split,
        weight.group_blocks,
    )
    return out


class Traits(NamedTuple):
    """Properties of a product that the kernels are compiled for."""

    bits: int
    group: int
    has_minimum: bool
    has_bias: bool
    split: bool
    nested: bool


@functools.cache
def _variant(chosen: Tile, traits: Traits, dtype: torch.dtype) -> Variant:
    options = _options(chosen, traits, product_type(dtype), USES_ASSEMBLY)
    return Variant(few_rows_kernel if chosen.few else many_rows_kernel, **options)


def _options(chosen: Tile, traits: Traits, product: Any, asm: bool) -> dict[str, Any]:
    return {
        "BITS": traits.bits,
        "GROUP": group_constant(traits.group),
        "HAS_MINIMUM": traits.has_minimum,
        "HAS_BIAS": traits.has_bias,
        "SPLIT": traits.split,
        **({"NESTED": traits.nested} if chosen.few else {}),
        "BLOCK_M": chosen.rows,
        "BLOCK_N": chosen.columns,
        "PRODUCT": product,
        "ASM": asm,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "enable_fp_fusion": True,
    }


def values_step(num_in: int) -> int:
    """Return the number of output features whose values are written and multiplied at once.

    These are whole tiles of the vendor's product. If columns of `out` did not begin at multiples of 16 bytes, the
    vendor's library would choose kernels of a third of the speed.
    """
    return max(_VALUES_TILE, _VALUES_BYTES // (2 * num_in) // _VALUES_TILE * _VALUES_TILE)


def _by_values(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Compute the product through the weight's values, some output features at a time."""
    step = values_step(weight.num_in)
    for first in range(0, weight.num_out, step):
        last = min(first + step, weight.num_out)
        values = values_of(weight, first, last, x.dtype)
        if bias is None:
            torch.mm(x, values.T, out=out[:, first:last])
        else:
            torch.addmm(bias[first:last], x, values.T, out=out[:, first:last])
    return out


def _check(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != weight.num_in:
        raise ValueError(f"activations of shape {tuple(x.shape)} for a weight of {weight.num_in} inputs")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"activations of {x.dtype}; bfloat16 and float16 are supported")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError("activations whose features are not adjacent")
    if bias is not None and (bias.shape != (weight.num_out,) or not bias.is_contiguous()):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} for {weight.num_out} output features")
    if x.device != weight.words.device:
        raise ValueError(f"activations on {x.device}, weights on {weight.words.device}")


_GROUPS = ((128, False), (128, True), (32, False), (32, True), (64, False), (64, True))
# Rows, fixed, split, nested: the rows of the tile table. With `fixed`, 32 rows are split as any others.
_ROWS = (
    (16, False, True, False),
    (16, False, False, False),
    (32, False, True, False),
    (32, False, False, False),
    (33, True, False, True),
    (64, False, True, False),
    (64, False, False, False),
    (128, False, True, False),
    (128, False, False, False),
)


def compilations(target: Target) -> list[Compilation]:
    """Return every configuration of the table, with a bias only for float16."""
    # ptxas puts a register or two of some tiles on the stack.
    spills = 16 if target in ("sm_80", "sm_100") else 0
    amd = target == "gfx942"
    result = []
    for product in COMPILED_PRODUCTS:
        for bits in (4, 8):
            for group, has_minimum in _GROUPS:
                for num_rows, fixed, split, nested in _ROWS:
                    chosen = tile(num_rows, bits, fixed, amd)
                    traits = Traits(bits, group, has_minimum, product == "fp16", split, nested)
                    result.append(_compilation(chosen, traits, product, "fp16", amd, spills))
    wide = Traits(4, 128, has_minimum=False, has_bias=False, split=True, nested=False)
    result.append(_compilation(tile(16, 4, False, amd), wide, "bf16", "fp32", amd, spills))
    return result


def _compilation(chosen: Tile, traits: Traits, product: Product, scales: str, amd: bool, spills: int) -> Compilation:
    options = _options(chosen, traits, NAMED_TYPES[product], not amd)
    words = [f"{product} int{options['BITS']} g={options['GROUP']} scales={scales}"]
    words += [f"tile={chosen.rows}x{chosen.columns} warps={chosen.num_warps}"]
    words += [name.lower() for name in ("HAS_MINIMUM", "HAS_BIAS", "SPLIT", "NESTED") if options.get(name)]
    return Compilation(
        "few_rows_kernel" if chosen.few else "many_rows_kernel",
        " ".join(words),
        few_rows_kernel if chosen.few else many_rows_kernel,
        {
            "p_x p_bias p_out": f"*{product}",
            "p_words": "*i16" if options["BITS"] == 4 else "*u8",
            "p_scales p_minimums": f"*{scales}",
            "p_partials": "*fp32",
            "p_counters": "*i32",
        },
        options,
        product=product,
        rows=chosen.rows if chosen.few else chosen.columns,
        spills_allowed=64 if options.get("NESTED") else spills,  # prompts in deterministic mode
        multiples=("num_out", "num_in", "stride_x"),
    )
