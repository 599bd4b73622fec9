"""Shapes of int8 products for tests and benchmarks."""

from __future__ import annotations

import functools

import torch

from kernels.common.quantized import ActivationQuantization
from kernels.common.triton.compilations import Benchmark
from kernels.ops.quantize.reference import quantize

# (rows, inputs, output features)
SHAPES = [(1, 16, 1), (1, 128, 40), (3, 272, 33), (17, 384, 130), (65, 144, 96), (130, 256, 192), (300, 64, 17)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Linear layers of Llama-3.1-8B: (name, inputs, output features).
LLAMA_8B = [("qkv", 4096, 6144), ("o", 4096, 4096), ("gate_up", 4096, 28672), ("down", 14336, 4096)]


def random_weight(num_out: int, width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a weight with values of about 1 / sqrt(width), on the generator's device."""
    device = generator.device
    codes = torch.randint(-128, 128, (num_out, width), generator=generator, device=device, dtype=torch.int8)
    scales = torch.rand(num_out, generator=generator, device=device) + 0.5
    return codes, scales / (74 * width**0.5)


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks of the layers of Llama-3.1-8B at 1, 16, 256 and 2048 rows; `scale` divides their sizes."""
    from kernels.ops.linear_int8.triton import linear_int8

    generator = torch.Generator(device).manual_seed(0)
    found = []
    for name, width, num_out in LLAMA_8B:
        width, num_out = max(width // scale // 16 * 16, 16), max(num_out // scale, 16)
        weights = [random_weight(num_out, width, generator) for _ in range(4)]
        for rows in (1, 16, max(256 // scale, 1), max(2048 // scale, 1)):
            x = torch.randn((rows, width), generator=generator, device=device).bfloat16()
            codes = quantize(x, ActivationQuantization("int8_token"))
            found.append(
                Benchmark(
                    name=f"linear_int8 {name} rows={rows}",
                    runs=tuple(functools.partial(linear_int8, codes, *weight, None) for weight in weights),
                    num_bytes=width * num_out + rows * width + 2 * rows * num_out,
                    num_operations=2 * rows * width * num_out,
                    speed=2.0,
                )
            )
    return found
