"""Shapes of batch-invariant linear layers for tests and benchmarks."""

from __future__ import annotations

import functools

import torch

from kernels.common.triton.compilations import Benchmark

# (rows, inputs, output features)
SHAPES = [(1, 16, 1), (1, 100, 40), (3, 272, 33), (65, 144, 96), (130, 256, 192), (5, 48, 8200)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Linear layers of Llama-3.1-8B: (name, inputs, output features).
LLAMA_8B = [("qkv", 4096, 6144), ("o", 4096, 4096), ("gate_up", 4096, 28672), ("down", 14336, 4096)]


def random_layer(
    rows: int, width: int, num_out: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activations of about 1 and a weight that keeps them at this size, on the generator's device."""
    device = generator.device
    x = torch.randn((rows, width), generator=generator, device=device)
    weight = torch.randn((num_out, width), generator=generator, device=device) / width**0.5
    return x.to(dtype), weight.to(dtype)


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks of the layers of Llama-3.1-8B in bfloat16 at 1, 16 and 2048 rows.

    `scale` divides their sizes.
    """
    from kernels.ops.linear_dense.triton import linear_dense

    generator = torch.Generator(device).manual_seed(0)
    found = []
    for name, width, num_out in LLAMA_8B:
        width, num_out = max(width // scale, 16), max(num_out // scale, 16)
        for rows in (1, 16, max(2048 // scale, 1)):
            layers = [random_layer(rows, width, num_out, torch.bfloat16, generator) for _ in range(3)]
            found.append(
                Benchmark(
                    name=f"linear_dense {name} rows={rows}",
                    runs=tuple(functools.partial(linear_dense, *layer, None) for layer in layers),
                    num_bytes=2 * (width * num_out + rows * width + rows * num_out),
                    num_operations=2 * rows * width * num_out,
                )
            )
    return found
