"""Shapes of products with integer weights, for tests and benchmarks."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.weight_values.cases import LAYERS, Case, make
from kernels.ops.weight_values.layout import num_groups

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

_ROWS = (1, 16, 64, 256, 2048)


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks of layers of Llama-3.1-8B, their sizes divided by `scale`."""
    chosen: list[tuple[str, int, Literal[4, 8]]] = [(name, rows, 4) for rows in _ROWS for name in LAYERS]
    chosen += [("gate_up", rows, 8) for rows in (1, 16)]
    return [_benchmark(name, rows, bits, device, scale) for name, rows, bits in chosen]


def _benchmark(name: str, rows: int, bits: Literal[4, 8], device: torch.device, scale: int) -> Benchmark:
    from kernels.ops.linear_weight_only.triton import linear

    num_out, num_in = (max(64, size // scale) for size in LAYERS[name])
    rows = max(1, rows // scale)
    case = Case(rows, num_out, num_in, bits=bits, group=32 if bits == 8 else 128)
    weight_bytes = num_out * num_in * bits // 8 + num_groups(num_in, case.group) * num_out * 2
    # Different weights are used in turn, together larger than a second-level cache.
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
