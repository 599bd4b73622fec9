"""How Triton kernels are launched, the same on a GPU and in the interpreter (TRITON_INTERPRET=1, set before import)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.compilations import Target

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in the interpreter, on tensors of the CPU."""

TRITON_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}

NAMED_TYPES: dict[str, Any] = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
"""The float types by their names in signatures of kernels."""

ASSUMED_PROCESSORS = 132
"""Multiprocessors in the interpreter, where there are none to count: those of an H100 or H200."""


def product_type(dtype: torch.dtype) -> Any:
    """The type in which a kernel multiplies what it loads as `dtype`: the constexpr PRODUCT.

    Triton's interpreter gets bfloat16 products wrong without a word (3.9: off by 1e10), so they are float32 there.
    """
    if INTERPRETED and dtype is torch.bfloat16:
        return tl.float32
    return TRITON_TYPES[dtype]


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU: what the static grids are sized by."""
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def native_fp8(device: torch.device) -> bool:
    """Whether the GPU converts e4m3fn itself (compute capability 8.9 and up); elsewhere kernels do it by bits.

    So does the interpreter, which rounds wrongly to e4m3fn and reads its NaN as 480 (Triton 3.9).
    """
    if device.type != "cuda":
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def nearest_target(device: torch.device) -> Target:
    """The target whose tiles a GPU takes: consumer GPUs have no more shared memory than sm_80's tiles need."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return "sm_90" if major == 9 else "sm_100" if major == 10 else "sm_80"
