"""Shapes of FP8 products for tests and benchmarks."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from kernels.common.quantized import BLOCK, ActivationFormat, ActivationQuantization
from kernels.common.triton.compilations import Benchmark
from kernels.ops.linear_fp8.reference import Fp8Weight
from kernels.ops.quantize.reference import quantize

# (rows, inputs, output features)
SHAPES = [(1, 16, 1), (1, 128, 40), (3, 272, 33), (17, 384, 130), (65, 144, 96), (130, 256, 192)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

WeightScales = Literal["tensor", "channel", "block", "block per feature"]
# Activations that go with each kind of weight scales.
KINDS: list[tuple[WeightScales, ActivationFormat]] = [
    ("tensor", "fp8_tensor"),
    ("channel", "fp8_token"),
    ("block", "fp8_block"),
    ("block per feature", "fp8_block"),
]

# Linear layers of Llama-3.1-8B: (name, inputs, output features).
LLAMA_8B = [("qkv", 4096, 6144), ("o", 4096, 4096), ("gate_up", 4096, 28672), ("down", 14336, 4096)]


def random_weight(kind: WeightScales, num_out: int, width: int, generator: torch.Generator) -> Fp8Weight:
    """Return a weight with values of about 1 / sqrt(width), on the generator's device."""
    device = generator.device
    codes = torch.randn((num_out, width), generator=generator, device=device).mul_(64).clamp_(-448, 448)
    inner = -(-width // BLOCK)
    shapes = {
        "tensor": (1,),
        "channel": (num_out,),
        "block": (-(-num_out // BLOCK), inner),
        "block per feature": (num_out, inner),
    }
    scales = torch.rand(shapes[kind], generator=generator, device=device) + 0.5
    if kind == "tensor":
        scales = scales.expand(num_out).contiguous()
    return Fp8Weight(codes.to(torch.float8_e4m3fn), scales / (64 * width**0.5))


def quantization(activation: ActivationFormat, device: torch.device) -> ActivationQuantization:
    """Return the quantization of activations of about 1."""
    scale = torch.full((1, 1), 0.01, device=device) if activation == "fp8_tensor" else None
    return ActivationQuantization(activation, scale)


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks of the layers of Llama-3.1-8B at 1, 16, 256 and 2048 rows; `scale` divides their sizes."""
    from kernels.ops.linear_fp8.triton import linear_fp8

    generator = torch.Generator(device).manual_seed(0)
    found = []
    for name, width, num_out in LLAMA_8B:
        width, num_out = max(width // scale, BLOCK), max(num_out // scale, 16)
        for kind, activation in (KINDS[1], KINDS[2]):
            weights = [random_weight(kind, num_out, width, generator) for _ in range(4)]
            for rows in (1, 16, max(256 // scale, 1), max(2048 // scale, 1)):
                x = torch.randn((rows, width), generator=generator, device=device).bfloat16()
                codes = quantize(x, quantization(activation, device))
                found.append(
                    Benchmark(
                        name=f"linear_fp8 {name} {kind} rows={rows}",
                        runs=tuple(functools.partial(linear_fp8, codes, weight, None) for weight in weights),
                        num_bytes=width * num_out + rows * width + 2 * rows * num_out,
                        num_operations=2 * rows * width * num_out,
                        speed=2.0,
                    )
                )
    return found
