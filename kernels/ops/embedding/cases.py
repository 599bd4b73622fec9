"""Shapes of the embedding lookup for tests and benchmarks."""

from __future__ import annotations

import torch

from kernels.common.triton.compilations import Benchmark

# (tokens, rows of the table, width)
SHAPES = [(3, 0, 40), (0, 5, 64), (1, 1, 1), (7, 11, 127), (33, 50, 576), (3, 9, 5000)]
# (dtype of the table, dtype of the residual stream)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the shape of Llama-3.1-8B: rows of 4096 out of 128256."""
    from kernels.ops.embedding.triton import embed

    found = []
    rows, width = 128256 // scale, 4096 // scale
    table = torch.randn((rows, width), device=device, dtype=torch.bfloat16)
    for tokens in (max(n // scale, 1) for n in (1, 32, 256, 8192)):
        batches = [torch.randint(rows, (tokens,), dtype=torch.int32, device=device) for _ in range(4)]
        runs = tuple((lambda ids=ids: embed(ids, table, None, torch.bfloat16)) for ids in batches)
        found.append(Benchmark(f"embed [{tokens}, {width}]", runs, tokens * (4 + width * 4)))
    return found
