"""Last part of a kernel whose result a linear layer multiplies.

It stores the result unchanged, or as codes and scales.

See kernels/common/quantized.py for the formats. The norm, the activation and kernels/ops/quantize share this code, so
that fused and separate quantization give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.quantized import BLOCK, ActivationFormat, ActivationQuantization, Activations, QuantizedActivation
from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import NATIVE_FP8, Target
from kernels.common.triton.formats import encode_fp8, encode_int8
from kernels.common.triton.launch import INTERPRETED, native_fp8

LARGEST: dict[str, float] = {
    "fp8_tensor": 448.0,
    "fp8_token": 448.0,
    "fp8_block": 448.0,
    "int8_token": 127.0,
}
ROW_FORMATS: tuple[ActivationFormat, ...] = ("fp8_token", "int8_token")
"""Formats whose scale is known only when the whole row is known."""

# Smaller scales have no reciprocal in float32: all codes are 0 and the row is wrong by at most 448e-37.
_SMALLEST_SCALE = tl.constexpr(1e-37)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """Return the largest float32 magnitude along an axis.

    NaN counts as largest: compared by bits, because a maximum drops it.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def larger_magnitude(x, y):
    """Return the larger of two float32 magnitudes, element by element; NaN counts as largest."""
    x_bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(x_bits, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scales):
    """Return 1 / scale, or 0 for scale 0, rounded once.

    The division operator on a GPU is not, and the result determines codes.
    """
    usable = scales >= _SMALLEST_SCALE
    divisor = tl.where(usable, scales, 1.0)
    return tl.where(usable, tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor), 0.0)


@triton.jit
def encode(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Convert float32, already divided by its scale, to codes.

    Values beyond the largest code saturate; NaN stays NaN in fp8.
    """
    if FORMAT == "int8_token":
        return encode_int8(tl.minimum(tl.maximum(x, -127.0), 127.0))
    else:
        return encode_fp8(x, NATIVE)


@triton.jit
def store_tile(
    p_out,
    p_scales,
    b_x,
    i_row,
    i_tile,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store a tile of one row in FORMAT.

    Args:
        p_out: [T, WIDTH] of the result's dtype ("dense") or of codes; contiguous.
        p_scales: Float32 [1] to read (fp8_tensor), [T] or [T, ceil(WIDTH / 128)] to write.
        b_x: [TILE] float32; 0 beyond WIDTH. For formats with one scale per row it is the whole row.
        i_row: int64.
        i_tile: Index of the tile in its row.
        WIDTH: Length of a row.
        TILE: Length of a tile.
        FORMAT: Format of the result.
        LARGEST_CODE: Largest code.
        NATIVE: The GPU converts e4m3fn itself.
    """
    o_column = i_tile * TILE + tl.arange(0, TILE)
    mask = o_column < WIDTH
    p_row = p_out + i_row * WIDTH
    if FORMAT == "dense":
        tl.store(p_row + o_column, rounded(b_x, p_out.dtype.element_ty), mask=mask)
    elif FORMAT == "fp8_tensor":
        tl.store(p_row + o_column, encode(b_x * reciprocal(tl.load(p_scales)), FORMAT, NATIVE), mask=mask)
    elif FORMAT == "fp8_block":
        NUM_BLOCKS: tl.constexpr = TILE // 128
        ROW_BLOCKS: tl.constexpr = (WIDTH + 127) // 128
        b_blocks = tl.reshape(b_x, [NUM_BLOCKS, 128])
        b_scales = tl.div_rn(largest_magnitude(b_blocks, 1), LARGEST_CODE)
        o_block = i_tile * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
        tl.store(p_scales + i_row * ROW_BLOCKS + o_block, b_scales, mask=o_block < ROW_BLOCKS)
        b_codes = encode(b_blocks * reciprocal(b_scales)[:, None], FORMAT, NATIVE)
        o_place = o_block[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(p_row + o_place, b_codes, mask=o_place < WIDTH)
    else:
        b_scale = tl.div_rn(largest_magnitude(b_x, 0), LARGEST_CODE)
        tl.store(p_scales + i_row, b_scale)
        tl.store(p_row + o_column, encode(b_x * reciprocal(b_scale), FORMAT, NATIVE), mask=mask)


class Outputs(NamedTuple):
    """Outputs of a launch, and the part that the caller gets.

    Attributes:
        out: [T, n] as the kernel sees it: codes of e4m3fn are uint8 if the kernel encodes them by bits.
        scales: Float32, see `store_tile`; `out` if there are none.
        codes: [T, n] as the linear layer gets it.
        format: Constant FORMAT.
        largest: Constant LARGEST_CODE.
        native: Constant NATIVE.
    """

    out: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor
    format: str
    largest: float
    native: bool

    def result(self, dtype: torch.dtype) -> Activations:
        """Return the activations for the linear layer. `dtype` is that of the activations before."""
        return self.codes if self.format == "dense" else QuantizedActivation(self.codes, self.scales, dtype)


@functools.cache
def _encodes_natively(device: torch.device) -> bool:
    """Return True if the device encodes e4m3fn correctly.

    Triton's interpreter (3.9) loses a carry out of the mantissa.
    """
    return native_fp8(device) and not INTERPRETED


def outputs(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, quantization: ActivationQuantization | None
) -> Outputs:
    """Allocate [rows, width] activations of `dtype`, quantized or not.

    Raises:
        ValueError: A fixed scale is required and missing.
    """
    if quantization is None:
        out = torch.empty((rows, width), dtype=dtype, device=device)
        return Outputs(out, out, out, "dense", 1.0, native=True)
    format = quantization.format
    native = _encodes_natively(device)
    if format == "int8_token":
        codes = out = torch.empty((rows, width), dtype=torch.int8, device=device)
    else:
        codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
        out = codes if native else codes.view(torch.uint8)
    if format == "fp8_tensor":
        fixed = quantization.scale
        if fixed is None or fixed.dtype is not torch.float32 or fixed.numel() != 1:
            raise ValueError("fp8_tensor needs the checkpoint's scale of the activations, one float32")
        scales = fixed
    else:
        groups = -(-width // BLOCK) if format == "fp8_block" else 1
        scales = torch.empty((rows, groups), dtype=torch.float32, device=device)
    return Outputs(out, scales, codes, format, LARGEST[format], native)


def result_types(format: str, target: Target, dtype: str) -> dict[str, str]:
    """Return the types of p_out and p_scales for `compilations`. dtype: "bf16", ..."""
    if format == "dense":
        return {"p_out p_scales": f"*{dtype}"}
    codes = "*i8" if format == "int8_token" else "*fp8e4nv" if target in NATIVE_FP8 else "*u8"
    return {"p_out": codes, "p_scales": "*fp32"}


def result_options(format: str, native: bool, num_warps: int) -> dict[str, Any]:
    """Return the constants of `store_tile` except the sizes, and the launch options of kernels that call it."""
    return {
        "FORMAT": format,
        "LARGEST_CODE": LARGEST.get(format, 1.0),
        "NATIVE": native or format == "dense",
        "num_warps": num_warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
