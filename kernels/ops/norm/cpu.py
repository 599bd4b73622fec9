"""RMS normalization with residual addition on the CPU: one pass over the residual, with rows divided among threads."""

from __future__ import annotations

from typing import Any

import torch
from numba import cfunc, literally, types

from kernels.common.cpu.pool import Kernel, num_threads
from kernels.common.cpu.simd import WIDTH, atomic_add, inner, load_f32, vadd, vfma, vload, vmul, vsplat, vstore, vsum

# Below this number of values, one thread finishes before another one has woken up.
_MIN_PARALLEL = 65536


def supported(hidden_size: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel supports rows of this width."""
    return hidden_size % WIDTH == 0 and dtype in (torch.float32, torch.bfloat16)


@inner
def norm_row(
    has_delta: Any, delta: Any, residual: Any, weight: Any, out: Any, hidden: Any, eps: Any, bf16: Any
) -> None:
    """Process one row; bf16 is a literal."""
    literally(bf16)
    element = 2 if bf16 else 4
    squares = vsplat(0.0)
    for i in range(0, hidden, 16):
        x = vload(residual + i * 4, 0)
        if has_delta:
            x = vadd(x, vload(delta + i * element, bf16))
            vstore(residual + i * 4, x, 0)
        squares = vfma(x, x, squares)
    scale = vsplat(types.float32(1.0) / (vsum(squares) / types.float32(hidden) + eps) ** types.float32(0.5))
    for i in range(0, hidden, 16):
        x = vmul(vmul(vload(residual + i * 4, 0), scale), vload(weight + i * 4, 0))
        vstore(out + i * element, x, bf16)


def compile_add_rms_norm(hidden: int, bf16: int) -> Any:
    """Compile the kernel for rows of `hidden` values.

    bf16 is 1 if delta and result are bfloat16. The residual is float32.
    """
    element = 2 if bf16 else 4

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def add_rms_norm(block: Any) -> None:
        delta, residual, weight, out, rows, eps = block[0], block[1], block[2], block[3], block[4], block[5]
        counters = block[31]
        while True:
            row = atomic_add(counters, 1)
            if row >= rows:
                break
            source = delta + row * hidden * element
            base, target = residual + row * hidden * 4, out + row * hidden * element
            norm_row(delta != 0, source, base, weight, target, hidden, load_f32(eps), bf16)

    return add_rms_norm


class AddRMSNorm:
    """RMS normalization for one row width and dtype."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._function = compile_add_rms_norm(hidden, int(dtype is torch.bfloat16))
        self._kernel = Kernel(self._function.address)
        self._hidden = hidden
        self._dtype = dtype
        self._eps = torch.zeros(1)
        self._eps_value = 0.0

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Compute the reference for contiguous tensors; the residual and the weight are float32."""
        if eps != self._eps_value:
            self._eps.fill_(eps)
            self._eps_value = eps
        rows = residual.shape[0]
        out = torch.empty((rows, self._hidden), dtype=self._dtype)
        self._kernel.store(0, delta, residual, weight, out, rows, self._eps)
        self._kernel.run(num_threads() if rows * self._hidden >= _MIN_PARALLEL else 1)
        return out
