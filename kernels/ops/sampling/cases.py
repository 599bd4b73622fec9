"""Shapes and parameters for the test and the benchmark of sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.sampling.inputs import SamplingInputs


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """Batch for a test or benchmark.

    Attributes:
        name: Name of the case.
        num_rows: Number of rows of logits.
        vocab_size: Number of tokens in a row.
        spread: Standard deviation of the logits; trained models are near 3.
        rows: (temperature, top_k, top_p, min_p) of each row, repeated cyclically.
        step: Round logits to multiples of this value, which makes some of them equal, as bfloat16 does; 0 does not
            round.
    """

    name: str
    num_rows: int
    vocab_size: int
    spread: float
    rows: tuple[tuple[float, int, float, float], ...]
    step: float = 0.0


_MIXED = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 40, 0.95, 0.02),
    (2.0, 1, 1.0, 0.0),
    (0.00001, 0, 0.5, 1.0),
)

CASES = (
    SamplingCase("mixed", 16, 49152, 3.0, _MIXED),
    SamplingCase("flat", 8, 49152, 1.0, _MIXED),
    SamplingCase("equal logits", 16, 1009, 2.0, _MIXED, step=0.25),
    SamplingCase("one token", 8, 1, 1.0, _MIXED),
    SamplingCase("less than a chunk", 8, 7, 1.0, _MIXED),
    SamplingCase("odd", 9, 65, 5.0, _MIXED),
    SamplingCase("padded vocabulary", 8, 50257, 4.0, _MIXED),
    SamplingCase("far apart", 8, 4099, 200.0, _MIXED),
    SamplingCase("top_k in the last bucket", 4, 5000, 40.0, ((0.5, 4990, 1.0, 0.0), (0.3, 2500, 0.9999, 0.0))),
    SamplingCase("top_k beyond the vocabulary", 4, 300, 1.0, ((1.0, 2**31 - 1, 0.99, 0.0),)),
)


def make_case(case: SamplingCase, seed: int = 0) -> tuple[torch.Tensor, SamplingInputs]:
    """Return logits and inputs of a case."""
    generator = torch.Generator().manual_seed(seed)
    size = case.num_rows
    logits = torch.randn(size, case.vocab_size, generator=generator) * case.spread
    if case.step:
        logits = (logits / case.step).round() * case.step
    temperature, top_k, top_p, min_p = zip(*(case.rows[i % len(case.rows)] for i in range(size)))
    inputs = SamplingInputs(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        log_min_p=torch.tensor(min_p).log(),
        key=torch.randint(0, 2**32, (2, size), generator=generator),
        position=torch.randint(0, 2**17, (size,), generator=generator),
        choice=torch.randint(0, 128, (size,), generator=generator),
        any_random=True,
        any_filter=True,
    )
    return logits, inputs


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks at Llama's vocabulary; every launch but the last reads the logits once."""
    from kernels.ops.sampling.triton import sample
    from kernels.ops.sampling.triton_splits import scratch_size

    found = []
    vocab = 128256 // scale
    kinds: tuple[tuple[str, tuple[float, int, float, float], int], ...] = (
        ("greedy", (0.0, 0, 1.0, 0.0), 1),
        ("noise", (0.8, 0, 1.0, 0.0), 2),
        ("top_p", (0.8, 0, 0.95, 0.0), 2),
        ("top_k top_p", (0.8, 50, 0.95, 0.0), 2),
        ("top_k in the row", (2.0, 20000 // scale, 1.0, 0.0), 2),
    )
    for num_rows in (1, max(32 // scale, 1), max(256 // scale, 1)):
        batches = [torch.randn(num_rows, vocab, device=device) * 3 for _ in range(4)]
        scratch = torch.empty(scratch_size(num_rows, vocab), dtype=torch.int32, device=device)
        for name, row, num_reads in kinds:
            inputs = make_case(SamplingCase(name, num_rows, 1, 3.0, (row,)))[1].on(device)
            inputs = replace(inputs, any_random=row[0] > 0, any_filter=row[1] > 0 or row[2] < 1)
            runs = tuple(partial(sample, logits, inputs, scratch) for logits in batches)
            num_bytes = num_reads * num_rows * vocab * 4
            found.append(Benchmark(f"sample {name} [{num_rows}, {vocab}]", runs, num_bytes))
    return found
