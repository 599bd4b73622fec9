"""Shapes of the RMS norm for tests and benchmarks."""

from __future__ import annotations

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.quantize.cases import quantization

# (rows, hidden)
SHAPES = [(1, 16), (1, 576), (3, 64), (16, 576), (131, 576), (7, 4096)]
DTYPES = [torch.float32, torch.bfloat16]
STREAMS = [torch.float32, torch.float16, torch.bfloat16]
"""Dtypes of the residual stream on the GPU."""
GPU_SHAPES = [(0, 64), (1, 1), (3, 127), (5, 576), (2, 5000)]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the shape of Llama-3.1-8B: rows of 4096 in bfloat16, with and without FP8 results."""
    from kernels.ops.norm.triton import add_rms_norm

    found = []
    width = 4096 // scale
    weight = torch.ones(width, device=device)
    for rows in (max(n // scale, 1) for n in (1, 32, 256, 8192)):
        for format in (None, "fp8_token", "fp8_block"):
            how = None if format is None else quantization(format, device)
            pairs = [torch.randn((2, rows, width), device=device, dtype=torch.bfloat16) for _ in range(4)]
            runs = tuple(
                (lambda x=x, how=how: add_rms_norm(x[0], x[1], weight, 1e-5, torch.bfloat16, how)) for x in pairs
            )
            num_bytes = rows * width * (3 * 2 + (2 if how is None else 1)) + width * 4
            found.append(Benchmark(f"add_rms_norm {format or 'bf16'} [{rows}, {width}]", runs, num_bytes))
    return found
