"""Shapes of activation quantization for tests and benchmarks."""

from __future__ import annotations

import torch

from kernels.common.quantized import ActivationFormat, ActivationQuantization
from kernels.common.triton.compilations import Benchmark

FORMATS: tuple[ActivationFormat, ...] = ("fp8_tensor", "fp8_token", "fp8_block", "int8_token")
# (rows, width)
SHAPES = [(0, 64), (1, 1), (3, 127), (2, 128), (5, 576), (2, 2500)]
WIDE = (2, 16384 + 300)
"""Row width above the tile size."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def quantization(format: ActivationFormat, device: torch.device) -> ActivationQuantization:
    """Return the quantization of a format. A fixed scale makes some values saturate."""
    scale = torch.full((1, 1), 0.004, device=device) if format == "fp8_tensor" else None
    return ActivationQuantization(format, scale)


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks for the input of Llama-3.1-8B's output projection, [T, 4096]."""
    from kernels.ops.quantize.triton import quantize

    found = []
    width = 4096 // scale
    for rows in (max(n // scale, 1) for n in (1, 32, 256, 8192)):
        for format in FORMATS[1:]:
            xs = [torch.randn((rows, width), device=device, dtype=torch.bfloat16) for _ in range(4)]
            how = quantization(format, device)
            runs = tuple((lambda x=x, how=how: quantize(x, how)) for x in xs)
            found.append(Benchmark(f"quantize {format} [{rows}, {width}]", runs, rows * width * 3))
    return found
