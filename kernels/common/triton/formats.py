"""Number formats in kernels: e4m3fn natively or by bits, int8, and int4 in the two halves of a byte.

A cell of the KV cache is code * scale (kernels/ops/attention/kv_pages.py). All codes are exact in bfloat16, float16
and float32, so kernels multiply codes and apply the scales to scores and weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST_FP8 = tl.constexpr(448.0)
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: the unit of float32 is 1 from there on
_SMALL_FP8 = tl.constexpr(16384.0)  # 2**14: the unit of float32 is 2**-9 there, as that of e4m3fn's subnormals


@triton.jit
def round_even(x):
    """Round float32 of magnitude below 2**22 to the nearest integer, ties to even, as torch.round does."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def decode_fp8(codes, NATIVE: tl.constexpr, TYPE: tl.constexpr):
    """Decode e4m3fn to TYPE exactly, including NaN. `codes`: float8e4nv if NATIVE, else the same bits as uint8."""
    if NATIVE:
        values = codes.to(TYPE)
    else:
        bits = codes.to(tl.int16)
        # Exponent and mantissa at their places in float16, whose bias is larger by 8; subnormals are correct too.
        placed = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide = placed.to(tl.float16, bitcast=True) * 256.0
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(TYPE)
    return values


@triton.jit
def encode_fp8(x, NATIVE: tl.constexpr):
    """Encode float32 as e4m3fn, to nearest, ties to even, clamped to +-448.

    NaN stays. float8e4nv if NATIVE, else uint8.
    """
    held = tl.where(x != x, x, tl.minimum(tl.maximum(x, -_LARGEST_FP8), _LARGEST_FP8))
    if NATIVE:
        codes = held.to(tl.float8e4nv)
    else:
        bits = held.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
        small = (tl.abs(held) + _SMALL_FP8).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < (121 << 23), small, normal)
        code = tl.where(x != x, 0x7F, code)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def encode_int8(x):
    """Encode float32 of magnitude at most 127 as int8, ties to even."""
    return round_even(x).to(tl.int8)


@triton.jit
def encode_int4(low, high):
    """Encode two float32 tiles of magnitude at most 7 as uint8: each code plus 8, `low` in the low half of the byte."""
    return (round_even(low).to(tl.int32) + 8 | (round_even(high).to(tl.int32) + 8) << 4).to(tl.uint8)


@triton.jit
def decode_int4_low(codes, TYPE: tl.constexpr):
    """Decode the code in the low half of each uint8."""
    return ((codes & 15).to(tl.int8) - 8).to(TYPE)


@triton.jit
def decode_int4_high(codes, TYPE: tl.constexpr):
    """Decode the code in the high half of each uint8."""
    return ((codes >> 4).to(tl.int8) - 8).to(TYPE)


@triton.jit
def decode_cells(codes, FORMAT: tl.constexpr, NATIVE: tl.constexpr, TYPE: tl.constexpr):
    """Decode codes of a KVFormat with one code per element ("dense", "fp8", "int8") to TYPE.

    See decode_int4_* for "int4".
    """
    if FORMAT == "fp8":
        values = decode_fp8(codes, NATIVE, TYPE)
    else:
        values = codes.to(TYPE)
    return values
