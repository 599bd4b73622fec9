"""Shapes of penalties for their test and their benchmark."""

from __future__ import annotations

from functools import partial

import torch

from kernels.gpu.benchmark import Benchmark
from kernels.sampling.inputs import PenaltyInputs


def penalties(num_rows: int, vocab: int, seed: int = 0) -> PenaltyInputs:
    """Of `num_rows` of the rows of num_rows + 2 logits, in tables with three more slots; a third of the tokens seen."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows + 3, vocab)
    counts = torch.randint(1, 4, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    return PenaltyInputs(
        rows=torch.randperm(num_rows + 2, generator=generator)[:num_rows],
        slots=torch.randperm(num_rows + 3, generator=generator)[:num_rows],
        output_counts=counts.int(),
        in_prompt=torch.rand(shape, generator=generator) < 0.2,
        repetition=torch.rand(num_rows, generator=generator) + 0.6,
        presence=torch.randn(num_rows, generator=generator),
        frequency=torch.randn(num_rows, generator=generator),
    )


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Llama's vocabulary: logits read and written, counts and flags read."""
    from kernels.penalties.triton import penalize

    found = []
    vocab = 128256 // scale
    for num_rows in (1, max(32 // scale, 1)):
        inputs = penalties(num_rows, vocab)
        moved = PenaltyInputs(*(getattr(inputs, name).to(device) for name in inputs.__slots__))
        batches = [torch.randn(num_rows + 2, vocab, device=device) for _ in range(4)]
        runs = tuple(partial(penalize, logits, moved) for logits in batches)
        found.append(Benchmark(f"penalize [{num_rows}, {vocab}]", runs, num_rows * vocab * (4 + 4 + 4 + 1)))
    return found
