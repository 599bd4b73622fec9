"""Largest deviations of kernels from their references, one table for all tests: (relative, absolute)."""

from __future__ import annotations

import torch

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float8_e4m3fn: (2e-3, 2e-3),  # sums of FP8 products on Hopper, which keeps some 14 bits of 128 of them
}


def of_attention(dtype: torch.dtype, kv_format: str) -> tuple[float, float]:
    """Return the tolerance of attention with queries of `dtype` over cells of a KVFormat.

    Beside float16 queries, weights of quantized values are bfloat16 (kernels/ops/attention/triton_cells.py).
    """
    quantized = kv_format != "dense" and dtype is torch.float16
    return TOLERANCES[torch.bfloat16 if quantized else dtype]
