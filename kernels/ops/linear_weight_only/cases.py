"""Shapes of the products with integer weights, for test and benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from kernels.common.triton.benchmark import Benchmark
from kernels.ops.linear_weight_only.layout import PackedWeight, empty_words, new_counters, num_groups, pack_rows


@dataclass(frozen=True, slots=True)
class Case:
    """One product; group 0: one scale for all inputs of an output feature."""

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
    Case(1, 64, 128),
    Case(1, 70, 576, group=32, minimum=True),
    Case(3, 96, 1200, group=64, bias=True, dtype=torch.float16),
    Case(7, 33, 128, bits=8, group=32),
    Case(17, 64, 1152, bits=8, group=0, bias=True, minimum=True),
    Case(16, 40, 1024, group=256, minimum=True, scales=torch.float32),
    Case(32, 65, 96, group=32, bias=True),
    Case(33, 64, 256, minimum=True),
    Case(64, 96, 544, bits=8, group=32, bias=True, dtype=torch.float16),
    Case(40, 70, 1024, minimum=True, bias=True),
    Case(65, 130, 384, group=0),
    Case(70, 64, 1152),
    Case(130, 40, 200, bits=4, group=64, minimum=True, dtype=torch.float16),
]


def make(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, PackedWeight, torch.Tensor | None]:
    """x [rows, in], a weight of random codes, and the bias."""
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


# The layers of Llama-3.1-8B: output features and inputs.
_ROWS = (1, 16, 64, 256, 2048)
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Layers of Llama-3.1-8B, their sizes divided by `scale`."""
    chosen: list[tuple[str, int, Literal[4, 8]]] = [(name, rows, 4) for rows in _ROWS for name in LAYERS]
    chosen += [("gate_up", rows, 8) for rows in (1, 16)]
    return [_benchmark(name, rows, bits, device, scale) for name, rows, bits in chosen]


def _benchmark(name: str, rows: int, bits: Literal[4, 8], device: torch.device, scale: int) -> Benchmark:
    from kernels.ops.linear_weight_only.triton import linear

    num_out, num_in = (max(64, size // scale) for size in LAYERS[name])
    rows = max(1, rows // scale)
    case = Case(rows, num_out, num_in, bits=bits, group=32 if bits == 8 else 128)
    weight_bytes = num_out * num_in * bits // 8 + num_groups(num_in, case.group) * num_out * 2
    # Different weights in turn, until they are more than a second-level cache holds.
    count = min(8, 1 + (160 << 20) // weight_bytes) if scale == 1 else 1
    runs = []
    for seed in range(count):
        x, weight, bias = make(case, device, seed)
        runs.append(partial(linear, x, weight, bias))
    return Benchmark(
        name=f"int{bits} {name} rows={rows}",
        runs=tuple(runs),
        num_bytes=weight_bytes + rows * (num_in + num_out) * 2,
        num_operations=2 * rows * num_out * num_in,
    )
