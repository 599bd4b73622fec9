"""SiLU(gate) * up on the CPU; threads share blocks of a row."""

from __future__ import annotations

from typing import Any

import torch
from numba import cfunc, literally, types

from kernels.common.cpu.pool import Kernel, num_threads
from kernels.common.cpu.simd import WIDTH, atomic_add, inner, vload, vmul, vsilu, vstore

# Below this many outputs one thread finishes before another has woken up.
_MIN_PARALLEL = 16384


def supported(width: int, dtype: torch.dtype, activation: str) -> bool:
    """Return True if the kernel supports rows of `width` outputs."""
    return activation == "silu" and width % WIDTH == 0 and dtype in (torch.float32, torch.bfloat16)


@inner
def gate_row(source: Any, out: Any, width: Any, bf16: Any) -> None:
    """Compute one row; bf16 is a literal."""
    literally(bf16)
    element = 2 if bf16 else 4
    for i in range(0, width, 16):
        gate = vload(source + i * element, bf16)
        up = vload(source + (width + i) * element, bf16)
        vstore(out + i * element, vmul(vsilu(gate), up), bf16)


def compile_silu_and_mul(width: int, bf16: int) -> Any:
    """Compile a kernel for rows of 2 * width inputs; bf16: 1 for bfloat16, 0 for float32."""
    element = 2 if bf16 else 4

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def silu_and_mul(block: Any) -> None:
        source, out, rows, counters = block[0], block[1], block[2], block[31]
        while True:
            row = atomic_add(counters, 1)
            if row >= rows:
                break
            gate_row(source + row * 2 * width * element, out + row * width * element, width, bf16)

    return silu_and_mul


class SiluAndMul:
    """The operation for one row width and dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._function = compile_silu_and_mul(width, int(dtype is torch.bfloat16))
        self._kernel = Kernel(self._function.address)
        self._width = width
        self._dtype = dtype

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute [T, 2 * width] contiguous -> [T, width]."""
        rows = gate_up.shape[0]
        out = torch.empty((rows, self._width), dtype=self._dtype)
        self._kernel.store(0, gate_up, out, rows)
        self._kernel.run(num_threads() if rows * self._width >= _MIN_PARALLEL else 1)
        return out
