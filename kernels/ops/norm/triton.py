"""RMS normalization with preceding residual addition and optional quantization: one program per row."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.common.triton.activation_codes import outputs, result_options, result_types, store_tile
from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import NATIVE_FP8, Compilation, Target
from kernels.common.triton.launch import NAMED_TYPES, TRITON_TYPES, Variant

MAX_WIDTH = 32768
"""Maximum row width. A row stays in registers between the computation of the mean and the scaling."""


@functools.cache
def tile(width: int, num_lanes: int = 32) -> tuple[int, int]:
    """Return (TILE, num_warps) for rows of `width`.

    The result does not depend on the number of rows, because the order of the sum must not depend on the batch.
    """
    padded = max(128, triton.next_power_of_2(width))
    threads = min(max(padded // 16, 64), 1024)
    return padded, max(threads // num_lanes, 1)


@triton.jit
def add_rms_norm_kernel(
    p_delta,
    p_residual,
    p_weight,
    p_out,
    p_scales,
    eps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Process one row; see kernels/ops/norm/reference.py. The result is rounded to DTYPE before it is quantized."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, TILE)
    mask = o_column < WIDTH
    p_row = p_residual + i_row * WIDTH + o_column
    b_x = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        b_delta = tl.load(p_delta + i_row * WIDTH + o_column, mask=mask, other=0.0).to(tl.float32)
        b_sum = rounded(b_x + b_delta, p_residual.dtype.element_ty)
        tl.store(p_row, b_sum, mask=mask)
        b_x = b_sum.to(tl.float32)
    b_weight = tl.load(p_weight + o_column, mask=mask, other=0.0)
    mean = tl.sum(b_x * b_x, axis=0) / WIDTH
    b_x = rounded(b_x * tl.rsqrt(mean + eps) * b_weight, DTYPE).to(tl.float32)
    store_tile(p_out, p_scales, b_x, i_row, 0, WIDTH, TILE, FORMAT, LARGEST_CODE, NATIVE)


def add_rms_norm(
    delta: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    quantization: ActivationQuantization | None = None,
) -> Activations:
    """Compute the reference for contiguous tensors.

    Raises:
        ValueError: A row is wider than MAX_WIDTH, or a tensor has the wrong shape or is not contiguous.
    """
    rows, width = residual.shape
    if width > MAX_WIDTH:
        raise ValueError(f"the RMS norm supports rows of at most {MAX_WIDTH} values, got {width}")
    if delta is not None and delta.shape != residual.shape:
        raise ValueError(
            f"delta and residual must have the same shape, got {list(delta.shape)} and {list(residual.shape)}"
        )
    if weight.shape != (width,) or weight.dtype is not torch.float32:
        raise ValueError(
            f"the weight of the RMS norm must be float32 [{width}], got {weight.dtype} {list(weight.shape)}"
        )
    if not (residual.is_contiguous() and weight.is_contiguous() and (delta is None or delta.is_contiguous())):
        raise ValueError("the tensors of the RMS norm must be contiguous")
    outs = outputs(rows, width, dtype, residual.device, quantization)
    if rows:
        padded, num_warps = tile(width, 64 if torch.version.hip else 32)
        variant = _variant(width, padded, num_warps, dtype, delta is not None, outs.format, outs.native)
        variant((rows,), residual if delta is None else delta, residual, weight, outs.out, outs.scales, eps)
    return outs.result(dtype)


@functools.cache
def _variant(
    width: int, padded: int, num_warps: int, dtype: torch.dtype, has_delta: bool, format: str, native: bool
) -> Variant:
    sizes = {"WIDTH": width, "TILE": padded, "HAS_DELTA": has_delta, "DTYPE": TRITON_TYPES[dtype]}
    return Variant(add_rms_norm_kernel, **sizes, **result_options(format, native, num_warps))


_STREAMS = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"))  # dtypes of the model and of the residual stream
_FORMATS = ("dense", "fp8_token", "fp8_block", "int8_token", "fp8_tensor")
_OTHER_WIDTHS = (576, 5120, 8192, 18432)


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for each format of the result at 4096, and for odd, wide and maximum widths."""
    found = [_compilation(target, *dtypes, 4096, format, True) for dtypes in _STREAMS for format in _FORMATS]
    found += [
        _compilation(target, "bf16", "bf16", width, format, True) for width in _OTHER_WIDTHS for format in _FORMATS[:3]
    ]
    found += [_compilation(target, "fp32", "fp32", 4096, "dense", True)]
    return [*found, _compilation(target, "bf16", "bf16", 4096, "dense", False)]


def _compilation(target: Target, dtype: str, stream: str, width: int, format: str, has_delta: bool) -> Compilation:
    padded, num_warps = tile(width, 64 if target == "gfx942" else 32)
    sizes = {"WIDTH": width, "TILE": padded, "HAS_DELTA": has_delta, "DTYPE": NAMED_TYPES[dtype]}
    return Compilation(
        "add_rms_norm",
        f"{dtype} residual={stream} width={width} {format}" + ("" if has_delta else " no delta"),
        add_rms_norm_kernel,
        {
            "p_delta": f"*{dtype}" if has_delta else f"*{stream}",
            "p_residual": f"*{stream}",
            "p_weight": "*fp32",
            "eps": "fp32",
            **result_types(format, target, dtype),
        },
        sizes | result_options(format, target in NATIVE_FP8, num_warps),
        spills_allowed=64 if padded > 16384 else 0,
    )
