"""Conversion of integer weights to values, for products with many rows: kernel and launcher."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import Compilation, Product, Target
from kernels.common.triton.integer_codes import CODE_BLOCK, CODE_STEP, USES_ASSEMBLY, decode_integers, group_of_slot
from kernels.common.triton.launch import NAMED_TYPES, Variant, product_type
from kernels.ops.weight_values.layout import PackedWeight, group_constant

_COLUMNS = 64  # output features of a program


@triton.jit(do_not_specialize=["first_out", "last_out"])
def dequantize_kernel(
    p_words,
    p_scales,
    p_minimums,
    p_out,
    first_out,
    num_out,
    last_out,
    num_in,
    group_blocks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write the values [last_out - first_out, in] of some output features to p_out, in its type."""
    WORDS: tl.constexpr = CODE_STEP if BITS == 4 else CODE_BLOCK
    i_block = tl.program_id(0)
    o_row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_n = first_out + o_row
    o_step = tl.arange(0, CODE_STEP)
    in_n = o_n < last_out
    p_block = p_words + (tl.cast(i_block, tl.int64) * num_out + o_n)[:, None] * WORDS + o_step[None, :]
    if BITS == 4:
        b_words = tl.load(p_block, mask=in_n[:, None], other=0)
    for SLOT in tl.static_range(CODE_BLOCK // CODE_STEP):
        if BITS == 8:
            b_words = tl.load(p_block + SLOT * CODE_STEP, mask=in_n[:, None], other=0)
        o_group = group_of_slot(i_block, SLOT, group_blocks, GROUP) * num_out + o_n
        b_scale = tl.load(p_scales + o_group, mask=in_n, other=0.0).to(tl.float32)
        b_values = decode_integers(b_words, SLOT, BITS, PRODUCT, ASM).to(tl.float32) * b_scale[:, None]
        if HAS_MINIMUM:
            b_values += tl.load(p_minimums + o_group, mask=in_n, other=0.0).to(tl.float32)[:, None]
        o_k = i_block * CODE_BLOCK + SLOT * CODE_STEP + o_step
        p_value = p_out + o_row.to(tl.int64)[:, None] * num_in + o_k[None, :]
        tl.store(p_value, rounded(b_values, p_out.dtype.element_ty), mask=in_n[:, None] & (o_k < num_in)[None, :])


def values_of(weight: PackedWeight, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [last - first, in] values of some output features, computed in float32 and rounded once to `dtype`."""
    values = weight.words.new_empty((last - first, weight.num_in), dtype=dtype)
    variant = _variant(weight.bits, weight.group, weight.minimums is not None, dtype)
    variant(
        (weight.words.shape[0], -(-(last - first) // _COLUMNS)),
        weight.words,
        weight.scales,
        weight.scales if weight.minimums is None else weight.minimums,
        values,
        first,
        weight.num_out,
        last,
        weight.num_in,
        weight.group_blocks,
    )
    return values


@functools.cache
def _variant(bits: int, group: int, has_minimum: bool, dtype: torch.dtype) -> Variant:
    return Variant(dequantize_kernel, **_options(bits, group, has_minimum, product_type(dtype), USES_ASSEMBLY))


def _options(bits: int, group: int, has_minimum: bool, product: Any, asm: bool) -> dict[str, Any]:
    return {
        "BITS": bits,
        "GROUP": group_constant(group),
        "HAS_MINIMUM": has_minimum,
        "BLOCK_N": _COLUMNS,
        "PRODUCT": product,
        "ASM": asm,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


COMPILED_PRODUCTS: tuple[Product, ...] = ("bf16", "fp16")


def compilations(target: Target) -> list[Compilation]:
    """Return every configuration of the table."""
    return [
        Compilation(
            "dequantize_kernel",
            f"{product} int{bits} g={group}" + " has_minimum" * has_minimum,
            dequantize_kernel,
            {"p_words": "*i16" if bits == 4 else "*u8", "p_scales p_minimums": "*fp16", "p_out": f"*{product}"},
            _options(bits, group, has_minimum, NAMED_TYPES[product], target != "gfx942"),
            multiples=("num_out", "num_in"),
        )
        for product in COMPILED_PRODUCTS
        for bits in (4, 8)
        for group in (128, 64, 32)
        for has_minimum in (False, True)
    ]
