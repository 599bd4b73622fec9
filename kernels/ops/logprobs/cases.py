"""Shapes for the test and the benchmark of log-probabilities."""

from __future__ import annotations

from functools import partial

import torch

from kernels.common.triton.compilations import Benchmark

# (rows, vocabulary, number of likeliest tokens, multiple to which logits are rounded, to make some equal; 0: none)
SHAPES = [
    (1, 1, 5, 0.0),
    (3, 33, 20, 0.5),
    (2, 130, 128, 0.0),
    (4, 4097, 0, 0.0),
    (2, 9000, 8, 0.25),
    (1, 50257, 20, 0.0),
]


def make_case(rows: int, vocab: int, step: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [rows, vocab] logits and [rows] token ids; the first id stands for a failed row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    if step:
        logits = (logits / step).round() * step
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    token_ids[0] = -1
    return logits, token_ids


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks at Llama's vocabulary: one token with 20 alternatives, a batch, and a prompt's chunk."""
    from kernels.ops.logprobs.triton import compute_logprobs

    found = []
    vocab = 128256 // scale
    many, most = max(32 // scale, 1), max(256 // scale, 1)
    for rows, num_top in ((1, 20), (many, 20), (most, 0), (most, 20)):
        cases = [make_case(rows, vocab, 0.0, seed) for seed in range(4)]
        runs = tuple(partial(compute_logprobs, x.to(device), ids.to(device), num_top) for x, ids in cases)
        found.append(Benchmark(f"logprobs [{rows}, {vocab}] top={num_top}", runs, rows * vocab * 4))
    return found
