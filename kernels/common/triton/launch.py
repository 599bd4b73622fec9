"""Launching of Triton kernels, the same on a GPU and in the interpreter (TRITON_INTERPRET=1, set before import)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Product, Target
from kernels.common.triton.triton_internals import Launcher, active_driver, launcher_of, parameter_names

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""True if kernels run in the interpreter, on CPU tensors."""

TRITON_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}

FLOAT_NAMES: dict[torch.dtype, Product] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Names of the float types in signatures of kernels."""
TORCH_TYPES = {name: dtype for dtype, name in FLOAT_NAMES.items()}
NAMED_TYPES: dict[str, Any] = {name: TRITON_TYPES[dtype] for dtype, name in FLOAT_NAMES.items()}

ASSUMED_PROCESSORS = 132
"""Number of multiprocessors assumed in the interpreter: that of an H100 or H200."""


def product_type(dtype: torch.dtype) -> Any:
    """Return the type in which a kernel multiplies operands loaded as `dtype`: the constexpr PRODUCT.

    Triton's interpreter computes wrong bfloat16 products silently (3.9: wrong by 1e10), so they are float32 there.
    """
    if INTERPRETED and dtype is torch.bfloat16:
        return tl.float32
    return TRITON_TYPES[dtype]


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, which determines static grids."""
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def native_fp8(device: torch.device) -> bool:
    """Return True if the GPU converts e4m3fn itself (compute capability 8.9 and later).

    Elsewhere kernels do so by bits.

    The interpreter rounds wrongly to e4m3fn and reads its NaN as 480 (Triton 3.9), so it also uses bits.
    """
    if device.type != "cuda":
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def nearest_target(device: torch.device) -> Target:
    """Return the target whose tiles a GPU uses.

    Consumer GPUs have only as much shared memory as the tiles of sm_80 need.
    """
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return "sm_90" if major == 9 else "sm_100" if major == 10 else "sm_80"


_INT32 = range(-(1 << 31), 1 << 31)


class Variant:
    """A kernel with its constants, launched with less host time than by `kernel[grid](...)`.

    Triton's own path binds, inspects and hashes every parameter at each launch, which takes the host longer than most
    kernels of a small step take the GPU. Here it runs once per combination that Triton distinguishes (types, alignment
    of pointers, divisibility of integers); then the compiled kernel is launched directly. Callers create a variant
    once per choice of constants and keep it (functools.cache).

    Args:
        kernel: The jit function.
        constants: All constexpr parameters, and Triton's options: num_warps, num_stages, enable_fp_fusion.
    """

    __slots__ = ("_constants", "_kernel", "_ready")

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        self._ready: dict[tuple[Any, ...], tuple[Launcher, list[Any]]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launch the kernel.

        Args:
            grid: One to three numbers.
            *args: All other parameters in order: tensors, integers, floats.
        """
        if INTERPRETED:
            self._kernel[grid](*args, **self._constants)
            return
        driver = active_driver()
        device = driver.get_current_device()
        kinds: list[Any] = [device]
        values: list[Any] = []
        for value in args:
            if type(value) is int:
                kinds.append(1 if value == 1 else (value % 16 == 0, value in _INT32))
            elif type(value) is float:
                kinds.append(None)
            else:
                kinds.append(value.dtype)
                value = value.data_ptr()
                if value % 16:
                    kinds.append(0)
            values.append(value)
        key = tuple(kinds)
        ready = self._ready.get(key)
        if ready is None:
            compiled = self._kernel[grid](*args, **self._constants)
            rest = [self._constants[name] for name in parameter_names(self._kernel)[len(args) :]]
            self._ready[key] = launcher_of(compiled), rest
            return
        launcher, rest = ready
        height = grid[1] if len(grid) > 1 else 1
        depth = grid[2] if len(grid) > 2 else 1
        launcher.launch((grid[0], height, depth), driver.get_current_stream(device), values + rest)


class Scratch:
    """32-bit numbers, as many as the largest step so far needed."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.empty(0, dtype=torch.int32, device=device)
        self._replaced: list[torch.Tensor] = []  # captured graphs continue to use it

    def of(self, size: int) -> torch.Tensor:
        """Return at least `size` numbers of undefined value."""
        if self._words.numel() < size:
            self._replaced.append(self._words)
            self._words = torch.empty(size, dtype=torch.int32, device=self._words.device)
        return self._words
