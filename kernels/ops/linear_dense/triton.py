"""A linear layer whose rows do not depend on the batch: one tile and one order of summation (README.md)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import FLOAT_NAMES, NAMED_TYPES, Variant, product_type
from kernels.common.triton.tiles import Tile, load_operands, store_result, tile_of_program

_NARROW_FEATURES = 8192
"""Maximum number of output features for narrow tiles, which are more numerous and so occupy the processor."""

_HALF = (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))
_HALF_HIP = (Tile(64, 64, 64, 4, 2), Tile(64, 128, 64, 4, 2))
_SINGLE = (Tile(32, 32, 32, 4, 3), Tile(32, 64, 32, 4, 3))


def tile_for(dtype: torch.dtype, out_features: int, hip: bool) -> Tile:
    """Return the tile of a layer. It must not depend on the number of rows."""
    narrow, wide = _SINGLE if dtype is torch.float32 else _HALF_HIP if hip else _HALF
    return narrow if out_features <= _NARROW_FEATURES else wide


@triton.jit(do_not_specialize=["rows"])
def linear_dense_kernel(
    p_x,
    p_weight,
    p_bias,
    p_out,
    rows,
    out_features,
    in_features,
    stride_x,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile of out, summed over all inputs in ascending steps."""
    i_m, i_n = tile_of_program(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N), GROUP)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    row = o_m < rows
    column = o_n < out_features
    p_x_tile = p_x + o_m[:, None].to(tl.int64) * stride_x + o_k[None, :]
    p_weight_tile = p_weight + o_n[None, :].to(tl.int64) * in_features + o_k[:, None]
    b_out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(tl.cdiv(in_features, BLOCK_K)):
        o_input = i_k * BLOCK_K + o_k
        b_x, b_weight = load_operands(p_x_tile, p_weight_tile, row, column, o_input, in_features, EVEN_K)
        b_out = tl.dot(b_x.to(PRODUCT), b_weight.to(PRODUCT), b_out, input_precision="ieee", out_dtype=tl.float32)
        p_x_tile += BLOCK_K
        p_weight_tile += BLOCK_K
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_n, mask=column, other=0.0).to(tl.float32)[None, :]
    store_result(p_out, b_out, o_m, o_n, out_features, row, column)


def linear_dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute [T, K] @ [N, K].T + [N] -> [T, N] of x's dtype.

    Args:
        x: [T, K]; rows may have any stride, the values of a row are adjacent.
        weight: [N, K], contiguous, of x's dtype: bfloat16, float16 or float32.
        bias: [N], or None.
        out: [T, N] contiguous, to write to.

    Raises:
        ValueError: Shapes, dtypes or layout do not fit together.
    """
    rows, width = x.shape
    num_out, in_features = weight.shape
    if width != in_features or x.dtype is not weight.dtype or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"a linear layer of {weight.dtype} {num_out} x {in_features} cannot multiply {x.dtype} {list(x.shape)} "
            f"with strides {list(x.stride())}"
        )
    if out is None:
        out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tile = tile_for(x.dtype, num_out, torch.version.hip is not None)
    variant = _variant(tile, x.dtype, bias is not None, width % tile.k == 0)
    grid = (-(-rows // tile.m) * -(-num_out // tile.n),)
    variant(grid, x, weight, bias if bias is not None else out, out, rows, num_out, width, x.stride(0))
    return out


@functools.cache
def _variant(tile: Tile, dtype: torch.dtype, has_bias: bool, even: bool) -> Variant:
    return Variant(linear_dense_kernel, **_options(tile, product_type(dtype), has_bias, even))


def _options(tile: Tile, product: Any, has_bias: bool, even: bool) -> dict[str, Any]:
    return {"HAS_BIAS": has_bias, "EVEN_K": even, "PRODUCT": product, **tile.options}


def compilations(target: Target) -> list[Compilation]:
    """Return every tile of every dtype, with and without the rare options."""
    return [
        Compilation(
            "linear_dense",
            f"{name} {tile.m}x{tile.n}{' bias' if bias else ''}{'' if even else ' odd'}",
            linear_dense_kernel,
            {"p_x p_weight p_bias p_out": f"*{name}"},
            _options(tile, NAMED_TYPES[name], bias, even),
            product=name,
            rows=tile.m,
            multiples=("out_features", "in_features", "stride_x"),
        )
        for dtype, name in FLOAT_NAMES.items()
        for tile in (
            tile_for(dtype, features, target == "gfx942") for features in (_NARROW_FEATURES, _NARROW_FEATURES + 1)
        )
        for bias, even in ((False, True), (True, False))
    ]
