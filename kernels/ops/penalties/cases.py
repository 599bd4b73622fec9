"""Shapes for the test and the benchmark of penalties."""

from __future__ import annotations

from functools import partial

import torch

from kernels.common.tensors import on_device
from kernels.common.triton.compilations import Benchmark
from kernels.ops.sampling.inputs import PenaltyInputs


def penalties(num_rows: int, vocab: int, seed: int = 0, num_extra: int | None = None) -> PenaltyInputs:
    """Return penalties of `num_rows` of num_rows + 2 rows of logits, in tables with three extra slots.

    Args:
        num_rows: Number of rows with penalties.
        vocab: Number of tokens.
        seed: Seed of the tables and parameters.
        num_extra: Number of extra ids per row, some repeated and a third unused; None for no extra ids.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows + 3, vocab)
    counts = torch.randint(1, 4, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    extra = None
    if num_extra is not None:
        extra = torch.randint(0, min(vocab, 2 * num_extra + 1), (num_rows, num_extra), generator=generator)
        extra[torch.rand(extra.shape, generator=generator) < 0.3] = -1
    return PenaltyInputs(
        rows=torch.randperm(num_rows + 2, generator=generator)[:num_rows],
        slots=torch.randperm(num_rows + 3, generator=generator)[:num_rows],
        output_counts=counts.int(),
        in_prompt=torch.rand(shape, generator=generator) < 0.2,
        repetition=torch.rand(num_rows, generator=generator) + 0.6,
        presence=torch.randn(num_rows, generator=generator),
        frequency=torch.randn(num_rows, generator=generator),
        extra=extra,
    )


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks at Llama's vocabulary: logits are read and written, counts and flags read."""
    from kernels.ops.penalties.triton import penalize

    found = []
    vocab = 128256 // scale
    for num_rows, num_extra in ((1, None), (max(32 // scale, 1), None), (max(32 // scale, 1), 8)):
        inputs = on_device(penalties(num_rows, vocab, num_extra=num_extra), device)
        batches = [torch.randn(num_rows + 2, vocab, device=device) for _ in range(4)]
        runs = tuple(partial(penalize, logits, inputs) for logits in batches)
        name = f"penalize [{num_rows}, {vocab}]" + ("" if num_extra is None else f" and {num_extra} drafts")
        found.append(Benchmark(name, runs, num_rows * vocab * (4 + 4 + 4 + 1)))
    return found
