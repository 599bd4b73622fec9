"""Integer weights whose values are written out, for test and benchmark."""

from __future__ import annotations

from functools import partial

import torch

from kernels.common.triton.benchmark import Benchmark
from kernels.ops.linear_weight_only.cases import LAYERS, Case, make
from kernels.ops.linear_weight_only.layout import num_groups

CASES = [
    Case(1, 70, 576, group=32, minimum=True),
    Case(1, 33, 128, bits=8, group=32, dtype=torch.float16),
    Case(1, 40, 1024, group=256, minimum=True, scales=torch.float32),
    Case(1, 130, 200, bits=8, group=0, minimum=True),
    Case(1, 65, 320, group=64, dtype=torch.float16),
]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """A layer of Llama-3.1-8B, its sizes divided by `scale`."""
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
