"""Shapes of the gated activation for tests and benchmarks."""

from __future__ import annotations

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.activation.reference import Activation
from kernels.ops.quantize.cases import quantization

# (rows, outputs)
SHAPES = [(1, 16), (1, 1536), (3, 96), (16, 1536), (37, 1536)]
DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GPU_SHAPES = [(0, 64), (1, 1), (3, 127), (2, 2500)]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the shape of Llama-3.1-8B: 14336 outputs per row; alone and for FP8 linear layers."""
    from kernels.ops.activation.triton import activation_and_mul

    found = []
    width = 14336 // scale
    for rows in (max(n // scale, 1) for n in (1, 32, 256, 8192)):
        for format in (None, "fp8_token", "fp8_block"):
            how = None if format is None else quantization(format, device)
            xs = [torch.randn((rows, 2 * width), device=device, dtype=torch.bfloat16) for _ in range(4)]
            runs = tuple((lambda x=x, how=how: activation_and_mul(x, "silu", how)) for x in xs)
            num_bytes = rows * width * (2 * 2 + (2 if how is None else 1))
            found.append(Benchmark(f"silu_and_mul {format or 'bf16'} [{rows}, {width}]", runs, num_bytes))
    return found
