"""Shapes of expert layers for tests and benchmarks."""

from __future__ import annotations

import functools

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.grouped_linear import reference

# (tokens, top_k, experts, inputs, output features)
SHAPES = [(1, 1, 1, 16, 1), (1, 2, 8, 64, 40), (7, 4, 5, 100, 33), (40, 2, 3, 48, 96), (5, 6, 20, 32, 65)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Mixtures of experts: (name, experts, top_k, hidden, inner).
MODELS = [("Mixtral-8x7B", 8, 2, 4096, 14336), ("Qwen3-30B-A3B", 128, 8, 2048, 768)]


def random_routing(num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Return [T, top_k] expert ids on the generator's device; some experts are far more probable than others."""
    device = generator.device
    logits = torch.randn((num_tokens, num_experts), generator=generator, device=device)
    logits += torch.randn(num_experts, generator=generator, device=device)
    return reference.route(logits, top_k, renormalize=True)[0]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks of the first layer (gate and up) of each model in bfloat16 at 1, 64 and 2048 tokens.

    `scale` divides the sizes.
    """
    from kernels.ops.grouped_linear.triton import grouped_linear, order_by_expert

    generator = torch.Generator(device).manual_seed(0)
    found = []
    for name, num_experts, top_k, hidden, inner in MODELS:
        width, num_out = max(hidden // scale, 16), max(2 * inner // scale, 16)
        shape = (num_experts, num_out, width)
        weights = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)]
        for num_tokens in (1, max(64 // scale, 2), max(2048 // scale, 3)):
            ids = random_routing(num_tokens, top_k, num_experts, generator)
            order = order_by_expert(ids, num_experts)
            x = torch.randn((num_tokens, width), generator=generator, device=device).bfloat16()
            num_slots = num_tokens * top_k
            out = torch.empty((num_slots, num_out), dtype=x.dtype, device=device)
            used = int((order.offsets[1:] > order.offsets[:-1]).sum())
            found.append(
                Benchmark(
                    name=f"grouped_linear {name} tokens={num_tokens}",
                    runs=tuple(functools.partial(grouped_linear, x, one, None, order, None, out) for one in weights),
                    num_bytes=2 * (used * width * num_out + num_tokens * width + num_slots * num_out),
                    num_operations=2 * num_slots * width * num_out,
                )
            )
            found.append(
                Benchmark(
                    name=f"order_by_expert {name} tokens={num_tokens}",
                    runs=(functools.partial(order_by_expert, ids, num_experts),),
                    num_bytes=8 * num_slots,
                )
            )
    return found
