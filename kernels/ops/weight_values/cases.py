"""Packed integer weights for tests and benchmarks of this operation and of linear_weight_only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.weight_values.layout import PackedWeight, empty_words, new_counters, num_groups, pack_rows

# Layers of Llama-3.1-8B: output features and inputs.
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@dataclass(frozen=True, slots=True)
class Case:
    """One product; group 0 is one scale for all inputs of an output feature."""

    rows: int
    num_out: int
    num_in: int
    bits: Literal[4, 8] = 4
    group: int = 128
    minimum: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    scales: torch.dtype = torch.float16


CASES = [
    Case(1, 70, 576, group=32, minimum=True),
    Case(1, 33, 128, bits=8, group=32, dtype=torch.float16),
    Case(1, 40, 1024, group=256, minimum=True, scales=torch.float32),
    Case(1, 130, 200, bits=8, group=0, minimum=True),
    Case(1, 65, 320, group=64, dtype=torch.float16),
]


def make(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, PackedWeight, torch.Tensor | None]:
    """Return x [rows, in], a weight of random codes, and the bias."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    codes = torch.randint(
        0, 1 << case.bits, (case.num_out, case.num_in), generator=generator, device=device, dtype=torch.uint8
    )
    words = empty_words(case.num_out, case.num_in, case.bits, device)
    pack_rows(words, 0, codes)
    shape = (num_groups(case.num_in, case.group), case.num_out)
    scales = ((0.5 + uniform(*shape)) / (1 << case.bits) / case.num_in**0.5).to(case.scales)
    minimums = ((uniform(*shape) - 0.5) / case.num_in**0.5).to(case.scales) if case.minimum else None
    x = (uniform(case.rows, case.num_in) * 4 - 2).to(case.dtype)
    bias = (uniform(case.num_out) - 0.5).to(case.dtype) if case.bias else None
    counters = new_counters(case.num_out, device)
    weight = PackedWeight(words, scales, minimums, case.bits, case.group, case.num_in, counters)
    return x, weight, bias


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return a benchmark of a layer of Llama-3.1-8B, its sizes divided by `scale`."""
    from kernels.ops.weight_values.triton import values_of

    result = []
    num_out, num_in = (max(64, size // scale) for size in LAYERS["o"])
    for case in (Case(1, num_out, num_in), Case(1, num_out, num_in, bits=8, group=32)):
        weights = [make(case, device, seed)[1] for seed in range(8 if scale == 1 else 1)]
        packed = num_out * num_in * case.bits // 8 + num_groups(num_in, case.group) * num_out * 2
        result.append(
            Benchmark(
                name=f"int{case.bits} {num_out}x{num_in}",
                runs=tuple(partial(values_of, weight, 0, num_out, torch.bfloat16) for weight in weights),
                num_bytes=packed + num_out * num_in * 2,
            )
        )
    return result
