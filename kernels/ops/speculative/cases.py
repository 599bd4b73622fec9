"""Batches of drafts for the test and the benchmark of verification."""

from __future__ import annotations

from functools import partial

import torch

from kernels.common.tensors import on_device
from kernels.common.triton.compilations import Benchmark
from kernels.ops.sampling.cases import SamplingCase, make_case
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.speculative import reference
from kernels.ops.speculative.reference import DraftInputs

ROWS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.3, 40, 0.95, 0.02),
    (1.0, 0, 1.0, 0.1),
    (3.0, 0, 0.97, 0.0),
    (1.0, 2, 0.5, 0.0),
)
CASES = (
    SamplingCase("mixed", 24, 1009, 3.0, ROWS),
    SamplingCase("flat", 24, 1009, 0.5, ROWS),
    SamplingCase("equal logits", 24, 300, 2.0, ROWS, step=0.5),
    SamplingCase("one token", 8, 1, 1.0, ROWS),
    SamplingCase("less than a chunk", 24, 7, 1.0, ROWS),
    SamplingCase("several splits", 16, 9001, 3.0, ROWS),
)


def make_rejection(
    case: SamplingCase, seed: int = 0, likeness: float = 0.8
) -> tuple[torch.Tensor, SamplingInputs, DraftInputs]:
    """Return logits, inputs and drafts of a case.

    Of every five rows, three have a draft drawn from a distribution similar to the row's, one has a likely token
    without a distribution, and one has no draft.

    Args:
        case: Shape and parameters.
        seed: Seed of the logits and drafts.
        likeness: Share of the target's logits in the drafts' logits.
    """
    logits, inputs = make_case(case, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    noise = torch.randn(logits.shape, generator=generator) * case.spread
    likely = logits * likeness + noise * (1 - likeness)
    distributions = reference.probabilities(likely, inputs).float()
    kinds = torch.arange(len(logits)) % 5
    ids = torch.multinomial(distributions, 1, generator=generator).squeeze(1)
    ids = torch.where(kinds == 3, logits.argmax(dim=-1), ids)
    ids = torch.where(kinds == 4, -1, ids)
    order = torch.randperm(len(logits), generator=generator)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(logits))
    return logits, inputs, DraftInputs(ids, distributions[order], torch.where(kinds < 3, rows, -1))


def make_verification(
    counts: list[int], extra_rows: int = 0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token_ids, drafts and cu_rows of requests with `counts` rows.

    Most drafts match, and some rows have failed.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(counts) + extra_rows
    drafts = torch.randint(0, 5, (num_rows,), generator=generator)
    ids = torch.where(torch.rand(num_rows, generator=generator) < 0.2, 7, drafts)
    ids = torch.where(torch.rand(num_rows, generator=generator) < 0.05, -1, ids)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    drafts[bounds[1:][torch.tensor(counts) > 0] - 1] = -1
    return ids, drafts, bounds.int()


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks at Llama's vocabulary with five rows per request, with and without draft distributions."""
    from kernels.ops.sampling.triton_splits import scratch_size
    from kernels.ops.speculative.triton import reject, verify

    found = []
    vocab = 128256 // scale
    for num_requests in (1, max(2, 32 // scale)):
        ids, drafts, bounds = (x.to(device) for x in make_verification([5] * num_requests))
        runs = (partial(verify, ids, drafts, bounds),)
        found.append(Benchmark(f"verify {num_requests} x 5", runs, len(ids) * (8 + 8 + 1) + len(bounds) * 8))
        for name, row in (("noise", (0.8, 0, 1.0, 0.0)), ("top_p", (0.8, 0, 0.95, 0.0))):
            case = SamplingCase("", 5 * num_requests, vocab, 3.0, (row,))
            logits, inputs, of_rows = make_rejection(case)
            target, inputs = logits.to(device), inputs.on(device)
            scratch = torch.empty(scratch_size(*logits.shape), dtype=torch.int32, device=device)
            drawn = on_device(of_rows, device)
            alone = DraftInputs(drawn.token_ids)
            for what, inputs_of_drafts, reads in (("look-up", alone, 2), ("draft model", drawn, 3)):
                run = partial(reject, target, inputs, inputs_of_drafts, scratch)
                found.append(
                    Benchmark(f"reject {name}, {what} {list(logits.shape)}", (run,), reads * logits.numel() * 4)
                )
    return found
