"""Int8 weights times int8 activations, summed in int32 (README.md)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.common.quantized import QuantizedActivation
from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.common.triton.tiles import COMPILED_VARIANTS, Tile, load_operands, store_result, tile_of_program

# The first entry that fits is used: (maximum number of rows, tile). Sums are exact, so a row is the same in every tile.
# For the stages of few rows, see linear_fp8.
_TABLE = (
    (16, Tile(16, 32, 128, 4, 8)),
    (64, Tile(64, 32, 128, 4, 8)),
    (256, Tile(64, 64, 128, 4, 4)),
    (1 << 31, Tile(128, 128, 128, 8, 3)),
)
# MI300's shared memory of 64 KiB holds fewer stages.
_TABLE_HIP = (
    (16, Tile(16, 32, 128, 4, 3)),
    (64, Tile(64, 32, 128, 4, 3)),
    (256, Tile(64, 64, 128, 4, 2)),
    (1 << 31, Tile(128, 128, 64, 8, 2)),
)


def tile_for(rows: int, hip: bool) -> Tile:
    """Return the tile for a number of rows."""
    return next(tile for most, tile in (_TABLE_HIP if hip else _TABLE) if rows <= most)


@triton.jit(do_not_specialize=["rows"])
def linear_int8_kernel(
    p_x,
    p_x_scale,
    p_weight,
    p_weight_scale,
    p_bias,
    p_out,
    rows,
    out_features,
    in_sixteens,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile of out.

    in_sixteens is the number of inputs / 16, which tells the compiler that rows are aligned.
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
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for i_k in range(tl.cdiv(in_features, BLOCK_K)):
        o_input = i_k * BLOCK_K + o_k
        b_x, b_weight = load_operands(p_x_tile, p_weight_tile, row, column, o_input, in_features, EVEN_K)
        b_sum = tl.dot(b_x, b_weight, b_sum, out_dtype=tl.int32)
        p_x_tile += BLOCK_K
        p_weight_tile += BLOCK_K
    b_x_scale = tl.load(p_x_scale + o_m, mask=row, other=0.0)
    b_weight_scale = tl.load(p_weight_scale + o_n, mask=column, other=0.0)
    b_out = b_sum.to(tl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_n, mask=column, other=0.0).to(tl.float32)[None, :]
    store_result(p_out, b_out, o_m, o_n, out_features, row, column)


def linear_int8(
    x: QuantizedActivation,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply [T, K] int8_token activations by an int8 weight -> [T, N] of x.dtype; see reference.py.

    Args:
        x: The activations.
        codes: [N, K] int8; reference.check accepted codes and scales when they were created.
        scales: [N] float32.
        bias: [N], or None.
        out: [T, N] contiguous, to write to.

    Raises:
        ValueError: The activations do not fit the weight.
    """
    rows, width = x.codes.shape
    num_out, in_features = codes.shape
    if width != in_features or tuple(x.scales.shape) != (rows, 1) or x.codes.dtype is not torch.int8:
        raise ValueError(
            f"activations {x.codes.dtype} {list(x.codes.shape)} with scales {list(x.scales.shape)} do not fit "
            f"an int8 weight {num_out} x {in_features}"
        )
    if out is None:
        out = torch.empty((rows, num_out), dtype=x.dtype, device=x.codes.device)
    if rows == 0:
        return out
    tile = tile_for(rows, torch.version.hip is not None)
    variant = _variant(tile, bias is not None, width % tile.k == 0)
    grid = (-(-rows // tile.m) * -(-num_out // tile.n),)
    given = bias if bias is not None else out
    variant(grid, x.codes, x.scales, codes, scales, given, out, rows, num_out, width // 16)
    return out


@functools.cache
def _variant(tile: Tile, has_bias: bool, even: bool) -> Variant:
    return Variant(linear_int8_kernel, HAS_BIAS=has_bias, EVEN_K=even, **tile.options)


def compilations(target: Target) -> list[Compilation]:
    """Return every tile, with and without the rare options."""
    return [
        Compilation(
            "linear_int8",
            f"{tile.m}x{tile.n} {out_type}{' bias' if bias else ''}{'' if even else ' odd'}",
            linear_int8_kernel,
            {"p_x p_weight": "*i8", "p_x_scale p_weight_scale": "*fp32", "p_bias p_out": f"*{out_type}"},
            {"HAS_BIAS": bias, "EVEN_K": even, **tile.options},
            product="int8",
            rows=tile.m,
            multiples=("out_features",),
        )
        for _, tile in (_TABLE_HIP if target == "gfx942" else _TABLE)
        for out_type, bias, even in COMPILED_VARIANTS
    ]
