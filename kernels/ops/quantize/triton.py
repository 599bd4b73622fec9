"""Quantization of activations that no norm or activation kernel has quantized.

kernels/common/quantized.py describes the formats.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.common.quantized import ActivationQuantization, QuantizedActivation
from kernels.common.triton.activation_codes import (
    ROW_FORMATS,
    encode,
    larger_magnitude,
    largest_magnitude,
    outputs,
    reciprocal,
    result_options,
    result_types,
    store_tile,
)
from kernels.common.triton.compilations import NATIVE_FP8, Compilation, Target
from kernels.common.triton.launch import Variant


@functools.cache
def tile(width: int, format: str, num_lanes: int = 32) -> tuple[int, int]:
    """Return (TILE, num_warps) for rows of `width`."""
    widest = 16384 if format in ROW_FORMATS else 2048
    padded = min(max(triton.next_power_of_2(width), 128), widest)
    threads = min(max(padded // 16, 64), 1024)
    return padded, max(threads // num_lanes, 1)


@triton.jit
def load_tile(p_x, i_row, o_column, stride, WIDTH: tl.constexpr):
    """Load [TILE] float32 values of one row, with 0 beyond WIDTH."""
    return tl.load(p_x + i_row * stride + o_column, mask=o_column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def quantize_kernel(
    p_x,
    p_out,
    p_scales,
    stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize one tile; see kernels/ops/quantize/reference.py. stride: elements between rows of x.

    Grid: (rows, tiles).
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    b_x = load_tile(p_x, i_row, i_tile * TILE + tl.arange(0, TILE), stride, WIDTH)
    store_tile(p_out, p_scales, b_x, i_row, i_tile, WIDTH, TILE, FORMAT, LARGEST_CODE, NATIVE)


@triton.jit
def wide_row_kernel(
    p_x,
    p_out,
    p_scales,
    stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize one row wider than a tile with a single scale, reading it twice. Grid: (rows,)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_tile = tl.arange(0, TILE)
    b_largest = tl.zeros([TILE], dtype=tl.float32)
    for start in tl.range(0, WIDTH, TILE):
        b_largest = larger_magnitude(b_largest, load_tile(p_x, i_row, start + o_tile, stride, WIDTH))
    b_scale = tl.div_rn(largest_magnitude(b_largest, 0), LARGEST_CODE)
    tl.store(p_scales + i_row, b_scale)
    b_inverse = reciprocal(b_scale)
    for start in tl.range(0, WIDTH, TILE):
        o_column = start + o_tile
        b_x = load_tile(p_x, i_row, o_column, stride, WIDTH)
        tl.store(p_out + i_row * WIDTH + o_column, encode(b_x * b_inverse, FORMAT, NATIVE), mask=o_column < WIDTH)


def quantize(x: torch.Tensor, quantization: ActivationQuantization) -> QuantizedActivation:
    """Compute the reference; the values of each row of x [T, n] are contiguous.

    Raises:
        ValueError: The values of a row are not contiguous.
    """
    rows, width = x.shape
    if width > 1 and x.stride(1) != 1:
        raise ValueError("activations to quantize must have contiguous rows")
    outs = outputs(rows, width, x.dtype, x.device, quantization)
    if rows:
        size, num_warps = tile(width, outs.format, 64 if torch.version.hip else 32)
        wide = outs.format in ROW_FORMATS and width > size
        variant = _variant(width, size, num_warps, wide, outs.format, outs.native)
        variant((rows,) if wide else (rows, -(-width // size)), x, outs.out, outs.scales, x.stride(0))
    return QuantizedActivation(outs.codes, outs.scales, x.dtype)


@functools.cache
def _variant(width: int, size: int, num_warps: int, wide: bool, format: str, native: bool) -> Variant:
    kernel = wide_row_kernel if wide else quantize_kernel
    return Variant(kernel, WIDTH=width, TILE=size, **result_options(format, native, num_warps))


_FORMATS = ("fp8_token", "fp8_block", "int8_token", "fp8_tensor")


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for each format at 4096, and for wide and narrow rows."""
    found = [_compilation(target, dtype, 4096, format) for dtype in ("bf16", "fp16", "fp32") for format in _FORMATS]
    found += [_compilation(target, "bf16", 28672, format) for format in ROW_FORMATS]
    return found + [_compilation(target, "bf16", 576, format) for format in _FORMATS]


def _compilation(target: Target, dtype: str, width: int, format: str) -> Compilation:
    size, num_warps = tile(width, format, 64 if target == "gfx942" else 32)
    return Compilation(
        "quantize",
        f"{dtype} width={width} {format}",
        wide_row_kernel if format in ROW_FORMATS and width > size else quantize_kernel,
        {"p_x": f"*{dtype}", **result_types(format, target, dtype)},
        {"WIDTH": width, "TILE": size, **result_options(format, target in NATIVE_FP8, num_warps)},
        multiples=("stride",),
    )
