"""Gated activation of a feed-forward block followed by quantization.

A program takes a tile of a row. If the scale belongs to a whole row, it takes the row: at once as far as registers
allow, else tile by tile in two passes, the second of which finds its input in the cache.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.common.quantized import ActivationQuantization, Activations
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
from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import NATIVE_FP8, Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.ops.activation.reference import Activation

_MAX_EXPONENT = tl.constexpr(88.0)  # exp stays finite in float32
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_GELU_CUBIC = tl.constexpr(0.044715)
_GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)


@functools.cache
def tile(width: int, format: str, num_lanes: int = 32) -> tuple[int, int]:
    """Return (TILE, num_warps) for rows of `width` outputs."""
    if format in ROW_FORMATS:
        padded = min(max(triton.next_power_of_2(width), 128), 16384)
        threads = min(max(padded // 16, 64), 1024)
    else:
        padded = min(max(triton.next_power_of_2(width), 128), 1024)
        threads = max(padded // 8, 64)
    return padded, max(threads // num_lanes, 1)


@triton.jit
def gated(p_gate_up, i_row, o_column, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute activation(gate) * up, rounded to the input's dtype, as float32; 0 beyond WIDTH."""
    mask = o_column < WIDTH
    p_gate = p_gate_up + i_row * (2 * WIDTH) + o_column
    b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        b_gate = b_gate / (1.0 + tl.exp(tl.minimum(-b_gate, _MAX_EXPONENT)))
    elif ACTIVATION == "gelu":
        b_gate = 0.5 * b_gate * (1.0 + tl.erf(b_gate * _SQRT_HALF))
    else:
        # 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 y)): no vendor tanh, no cancellation.
        b_double = _GELU_SCALE * (b_gate + _GELU_CUBIC * b_gate * b_gate * b_gate)
        b_gate = b_gate / (1.0 + tl.exp(tl.minimum(-b_double, _MAX_EXPONENT)))
    return rounded(b_gate * b_up, p_gate_up.dtype.element_ty).to(tl.float32)


@triton.jit
def activation_and_mul_kernel(
    p_gate_up,
    p_out,
    p_scales,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Compute a tile; see kernels/ops/activation/reference.py. Grid: (rows, tiles of a row)."""
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    b_x = gated(p_gate_up, i_row, i_tile * TILE + tl.arange(0, TILE), WIDTH, ACTIVATION)
    store_tile(p_out, p_scales, b_x, i_row, i_tile, WIDTH, TILE, FORMAT, LARGEST_CODE, NATIVE)


@triton.jit
def wide_row_kernel(
    p_gate_up,
    p_out,
    p_scales,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Compute one scale per row for rows wider than a tile. Grid: (rows,)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_tile = tl.arange(0, TILE)
    b_largest = tl.zeros([TILE], dtype=tl.float32)
    for start in tl.range(0, WIDTH, TILE):
        b_x = gated(p_gate_up, i_row, start + o_tile, WIDTH, ACTIVATION)
        b_largest = larger_magnitude(b_largest, b_x)
    b_scale = tl.div_rn(largest_magnitude(b_largest, 0), LARGEST_CODE)
    tl.store(p_scales + i_row, b_scale)
    b_inverse = reciprocal(b_scale)
    for start in tl.range(0, WIDTH, TILE):
        o_column = start + o_tile
        b_x = gated(p_gate_up, i_row, o_column, WIDTH, ACTIVATION)
        tl.store(p_out + i_row * WIDTH + o_column, encode(b_x * b_inverse, FORMAT, NATIVE), mask=o_column < WIDTH)


def activation_and_mul(
    gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
) -> Activations:
    """Compute the operation of the reference; gate_up is contiguous.

    Raises:
        ValueError: Rows have an odd number of values or gaps between them.
    """
    rows, inputs = gate_up.shape
    if inputs % 2 or not gate_up.is_contiguous():
        raise ValueError(f"the gated activation needs contiguous rows of gate and up, not {inputs} values")
    width = inputs // 2
    outs = outputs(rows, width, gate_up.dtype, gate_up.device, quantization)
    if rows:
        size, num_warps = tile(width, outs.format, 64 if torch.version.hip else 32)
        wide = outs.format in ROW_FORMATS and width > size
        variant = _variant(width, size, num_warps, wide, activation, outs.format, outs.native)
        variant((rows,) if wide else (rows, -(-width // size)), gate_up, outs.out, outs.scales)
    return outs.result(gate_up.dtype)


@functools.cache
def _variant(
    width: int, size: int, num_warps: int, wide: bool, activation: Activation, format: str, native: bool
) -> Variant:
    kernel = wide_row_kernel if wide else activation_and_mul_kernel
    options = result_options(format, native, num_warps)
    return Variant(kernel, WIDTH=width, TILE=size, ACTIVATION=activation, **options)


_FORMATS = ("dense", "fp8_token", "fp8_block", "int8_token", "fp8_tensor")
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")


def compilations(target: Target) -> list[Compilation]:
    """Return each format and activation at 14336, wide rows, and narrow ones."""
    found = [_compilation(target, dtype, 14336, "silu", format) for dtype in ("bf16", "fp16") for format in _FORMATS]
    found += [_compilation(target, "bf16", 14336, kind, format) for kind in _ACTIVATIONS[1:] for format in _FORMATS]
    found += [_compilation(target, "bf16", 28672, "silu", format) for format in ROW_FORMATS]
    found += [_compilation(target, "bf16", 1536, "silu", format) for format in _FORMATS[:3]]
    return [*found, _compilation(target, "fp32", 14336, "silu", "dense")]


def _compilation(target: Target, dtype: str, width: int, activation: Activation, format: str) -> Compilation:
    size, num_warps = tile(width, format, 64 if target == "gfx942" else 32)
    options = {"WIDTH": width, "TILE": size, "ACTIVATION": activation}
    return Compilation(
        "activation_and_mul",
        f"{dtype} width={width} {activation} {format}",
        wide_row_kernel if format in ROW_FORMATS and width > size else activation_and_mul_kernel,
        {"p_gate_up": f"*{dtype}", **result_types(format, target, dtype)},
        options | result_options(format, target in NATIVE_FP8, num_warps),
    )
