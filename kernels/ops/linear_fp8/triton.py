"""FP8 weights times FP8 activations, accumulated in float32 (README.md)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.quantized import BLOCK, QuantizedActivation
from kernels.common.triton.compilations import NATIVE_FP8, Compilation, Target
from kernels.common.triton.formats import decode_fp8
from kernels.common.triton.launch import INTERPRETED, Variant, native_fp8
from kernels.common.triton.tiles import COMPILED_VARIANTS, Tile, load_operands, store_result, tile_of_program
from kernels.ops.linear_fp8.reference import Fp8Weight

# Few rows need narrow tiles, so that a weight of 4096 features occupies 128 multiprocessors, and enough stages to hide
# the latency of memory. With eight stages, a multiprocessor with one tile has 28 KiB of weights in transfer; with five
# (16 KiB), an H200 reached 58 % of its bandwidth. The first entry that fits is used: (maximum number of rows, tile).
# All tiles step over 128 inputs, the block of scales.
_NATIVE = (
    (64, Tile(64, 32, 128, 4, 8)),
    (256, Tile(64, 64, 128, 4, 4)),
    (1 << 31, Tile(128, 128, 128, 8, 3)),
)
_NATIVE_BLOCKS = (
    (64, Tile(64, 32, 128, 4, 8)),
    (256, Tile(64, 64, 128, 4, 4)),
    (1 << 31, Tile(64, 128, 128, 4, 3)),
)
# Codes are converted to bfloat16 before the product.
_CONVERTED = (
    (16, Tile(16, 32, 128, 4, 4)),
    (64, Tile(64, 32, 128, 4, 3)),
    (1 << 31, Tile(64, 64, 128, 4, 2)),
)
_CONVERTED_BLOCKS = (
    (16, Tile(16, 32, 128, 4, 4)),
    (1 << 31, Tile(64, 32, 128, 4, 3)),
)


def _table(native: bool, blocks: bool) -> tuple[tuple[int, Tile], ...]:
    if not native:
        return _CONVERTED_BLOCKS if blocks else _CONVERTED
    return _NATIVE_BLOCKS if blocks else _NATIVE


def tile_for(rows: int, native: bool, blocks: bool, invariant: bool) -> Tile:
    """Return the tile for a number of rows; `invariant` returns one tile for any number.

    With one tile, a row does not depend on the other rows.
    """
    table = _table(native, blocks)
    if invariant:
        return table[1][1]
    return next(tile for most, tile in table if rows <= most)


@triton.jit(do_not_specialize=["rows", "stride_x_scale"])
def linear_fp8_kernel(
    p_x,
    p_x_scale,
    p_weight,
    p_weight_scale,
    p_bias,
    p_out,
    rows,
    out_features,
    in_sixteens,
    stride_x_scale,
    ROWS_PER_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NATIVE: tl.constexpr,
    CONVERTED: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile of out.

    ROWS_PER_SCALE is 0 for one scale per output feature, else the number of features of a block.

    in_sixteens is the number of inputs / 16, which tells the compiler that rows are aligned. stride_x_scale is 0 if
    one scale holds for all rows. CONVERTED: codes are converted to PRODUCT first.
    """
    in_features = in_sixteens * 16
    i_m, i_n = tile_of_program(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N), GROUP)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    row = o_m < rows
    column = o_n < out_features
    p_x_tile = p_x + o_m[:, None].to(tl.int64) * in_features + o_k[None, :]
    p_weight_tile = p_weight + o_n[None, :].to(tl.int64) * in_features + o_k[:, None]
    p_x_scale_rows = p_x_scale + o_m.to(tl.int64) * stride_x_scale
    num_steps = tl.cdiv(in_features, BLOCK_K)
    if ROWS_PER_SCALE > 0:
        # If 128 features share a scale, the features of a tile share one too, because 128 is a multiple of BLOCK_N.
        o_scale = (i_n * BLOCK_N) // ROWS_PER_SCALE if ROWS_PER_SCALE >= BLOCK_N else o_n
        p_weight_scale_rows = p_weight_scale + o_scale.to(tl.int64) * num_steps
    b_out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(num_steps):
        o_input = i_k * BLOCK_K + o_k
        b_x, b_weight = load_operands(p_x_tile, p_weight_tile, row, column, o_input, in_features, EVEN_K)
        if CONVERTED:
            b_x = decode_fp8(b_x, NATIVE, PRODUCT)
            b_weight = decode_fp8(b_weight, NATIVE, PRODUCT)
        # Hopper's FP8 units keep few bits of a running sum, so their sums are added to a float32 sum after 128 inputs.
        if ROWS_PER_SCALE == 0:
            b_out = tl.dot(
                b_x, b_weight, b_out, input_precision="ieee", max_num_imprecise_acc=BLOCK_K, out_dtype=tl.float32
            )
        else:
            b_product = tl.dot(
                b_x, b_weight, input_precision="ieee", max_num_imprecise_acc=BLOCK_K, out_dtype=tl.float32
            )
            b_x_scale = tl.load(p_x_scale_rows + i_k, mask=row, other=0.0)
            if ROWS_PER_SCALE >= BLOCK_N:
                b_out += b_product * (b_x_scale * tl.load(p_weight_scale_rows + i_k))[:, None]
            else:
                b_weight_scale = tl.load(p_weight_scale_rows + i_k, mask=column, other=0.0)
                b_out += b_product * b_x_scale[:, None] * b_weight_scale[None, :]
        p_x_tile += BLOCK_K
        p_weight_tile += BLOCK_K
    if ROWS_PER_SCALE == 0:
        b_x_scale = tl.load(p_x_scale_rows, mask=row, other=0.0)
        b_weight_scale = tl.load(p_weight_scale + o_n, mask=column, other=0.0)
        b_out = b_out * b_x_scale[:, None] * b_weight_scale[None, :]
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_n, mask=column, other=0.0).to(tl.float32)[None, :]
    store_result(p_out, b_out, o_m, o_n, out_features, row, column)


def _product(native: bool) -> tl.dtype:
    if INTERPRETED:
        return tl.float32
    return tl.float8e4nv if native else tl.bfloat16


def _check_fit(x: QuantizedActivation, weight: Fp8Weight) -> None:
    """Check that activations and weight fit together.

    Raises:
        ValueError: They do not.
    """
    rows, width = x.codes.shape
    num_out, in_features = weight.codes.shape
    wanted = -(-width // BLOCK) if weight.blocks else 1
    if width != in_features or x.scales.shape[1] != wanted or x.scales.shape[0] not in (1, rows):
        raise ValueError(
            f"activations {list(x.codes.shape)} with scales {list(x.scales.shape)} do not fit an FP8 weight "
            f"{num_out} x {in_features} with scales {list(weight.scales.shape)}"
        )


def linear_fp8(
    x: QuantizedActivation,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    *,
    invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply [T, K] codes by [N, K] codes -> [T, N] of x.dtype; see reference.py.

    Args:
        x: The activations.
        weight: The weight; reference.check accepted it when it was created.
        bias: [N], or None.
        invariant: Use one tile for any number of rows.
        out: [T, N] contiguous, to write to.

    Raises:
        ValueError: The formats of activations and weight do not fit together.
    """
    _check_fit(x, weight)
    rows, width = x.codes.shape
    num_out = weight.codes.shape[0]
    if out is None:
        out = torch.empty((rows, num_out), dtype=x.dtype, device=x.codes.device)
    if rows == 0:
        return out
    native = native_fp8(out.device)
    tile = tile_for(rows, native or INTERPRETED, weight.blocks, invariant)
    codes, weight_codes = x.codes, weight.codes
    if not native:
        codes, weight_codes = codes.view(torch.uint8), weight_codes.view(torch.uint8)
    one_scale = x.scales.shape[0] == 1 and not weight.blocks
    variant = _variant(
        tile, weight.rows_per_scale if weight.blocks else 0, bias is not None, width % tile.k == 0, native
    )
    variant(
        (-(-rows // tile.m) * -(-num_out // tile.n),),
        codes,
        x.scales,
        weight_codes,
        weight.scales,
        bias if bias is not None else out,
        out,
        rows,
        num_out,
        width // 16,
        0 if one_scale else x.scales.shape[1],
    )
    return out


@functools.cache
def _variant(tile: Tile, rows_per_scale: int, has_bias: bool, even: bool, native: bool) -> Variant:
    return Variant(linear_fp8_kernel, **_options(tile, rows_per_scale, has_bias, even, native))


def _options(tile: Tile, rows_per_scale: int, has_bias: bool, even: bool, native: bool) -> dict[str, Any]:
    return {
        "ROWS_PER_SCALE": rows_per_scale,
        "HAS_BIAS": has_bias,
        "EVEN_K": even,
        "NATIVE": native,
        "CONVERTED": INTERPRETED or not native,
        "PRODUCT": _product(native),
        **tile.options,
    }


def compilations(target: Target) -> list[Compilation]:
    """Return every tile with every kind of scale, with the rare options only for the frequent kinds."""
    native = target in NATIVE_FP8
    codes = "*fp8e4nv" if native else "*u8"
    found = []
    for name, rows_per_scale in (("channel", 0), ("block", BLOCK), ("block per feature", 1)):
        for _, tile in _table(native, rows_per_scale > 0):
            for out_type, bias, even in COMPILED_VARIANTS[: 1 if rows_per_scale == 1 else 3]:
                found.append(
                    Compilation(
                        "linear_fp8",
                        f"{name} {tile.m}x{tile.n} {out_type}{' bias' if bias else ''}{'' if even else ' odd'}",
                        linear_fp8_kernel,
                        {"p_x p_weight": codes, "p_x_scale p_weight_scale": "*fp32", "p_bias p_out": f"*{out_type}"},
                        _options(tile, rows_per_scale, bias, even, native),
                        product="fp8" if native else "bf16",
                        rows=tile.m,
                        multiples=("out_features",),
                    )
                )
    return found
