"""What sampling parameters cost: a batch of 16 requests that all ask for something else, and one under grammars, beside
plain requests and as a share of a decode step, all in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels.backends.cpu_sampling import CpuSamplingOps
from shared.sampling_params import SamplingParams
from worker.executor.device import CpuDevice
from worker.executor.request_rows import RequestRows
from worker.plan import NewRow, ScheduledTokens, StepPlan
from worker.sampling.sampler import Sampler

NUM_REQUESTS = 16
PLAIN: dict[str, Any] = {"temperature": 0.8}
EVERY_KIND: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 5},
    {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2},
    {"temperature": 0.8, "logit_bias": {100 + i: -5.0 for i in range(200)}, "min_tokens": 400},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 1.2, "top_n_sigma": 1.0},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1, "min_p": 0.02},
    {"temperature": 0.8, "dynatemp_range": 0.4},
    {"temperature": 1.0, "mirostat": 1},
    {"temperature": 1.0, "mirostat": 2},
    {"temperature": 0.8, "dry_multiplier": 0.8, "dry_breakers": (198, 199)},
    {"temperature": 0.0, "dry_multiplier": 0.8},
    {"temperature": 0.8, "bad_words": tuple((i, i + 1, i + 2) for i in range(100, 300))},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(50, 5000))},
    {"temperature": 1.1, "typical_p": 0.95, "top_n_sigma": 2.0, "xtc_probability": 0.5, "dry_multiplier": 0.8},
)


class SampledBatch:
    """16 requests on rows of their own, each with a text that repeats itself, sampled from given logits."""

    def __init__(
        self, wishes: Sequence[dict[str, Any]], logits: torch.Tensor, context: int, ops: CpuSamplingOps
    ) -> None:
        vocab = logits.shape[1]
        self._rows = RequestRows(
            max_num_seqs=NUM_REQUESTS,
            max_num_tokens=NUM_REQUESTS,
            max_model_len=2 * context,
            page_size=16,
            num_groups=1,
            vocab_size=vocab,
            device=CpuDevice(),
        )
        self._sampler = Sampler(self._rows.sampling, ops)
        self._logits = logits
        text = [(7 * i) % 60 + 20 for i in range(context)]
        new = [
            NewRow(
                row=row,
                token_ids=text,
                num_prompt_tokens=context // 2,
                sampling=SamplingParams(seed=row, max_tokens=context, **wishes[row % len(wishes)]),
                eos_token_ids=[2],
                choice=0,
            )
            for row in range(NUM_REQUESTS)
        ]
        self._rows.stage(StepPlan(step=0, scheduled=[], new_rows=new))
        scheduled = [ScheduledTokens(row, context - 1, 1, True) for row in range(NUM_REQUESTS)]
        self._plan = StepPlan(step=1, scheduled=scheduled)

    def run(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """One step's sampling, with what it takes to stage it; mask: [16, ceil(vocab / 32)] int32."""
        sampled = self._rows.stage(self._plan).sampled
        if mask is not None:
            sampled = replace(sampled, mask=mask)
        return self._sampler.sample(self._logits.clone(), sampled).token_ids


def sampling_runs(logits: torch.Tensor, context: int, num_threads: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name; logits: [16, vocab] float32."""
    ops = CpuSamplingOps(num_threads)
    ops.compile()
    plain, mixed = (SampledBatch(wishes, logits, context, ops) for wishes in ((PLAIN,), EVERY_KIND))
    few = torch.zeros((NUM_REQUESTS, -(-logits.shape[1] // 32)), dtype=torch.int32)
    few[:, 3] = 0b101100  # three tokens
    return {"plain": plain.run, "every kind": mixed.run, "grammar, few bits": lambda: plain.run(few)}


def report(step_ms: float, times: dict[str, float]) -> list[dict[str, object]]:
    """Prints the table; one entry a line of it."""
    print(f"\n{'sampling of 16 requests':24} {'ms':>7} {'more than plain, of a step':>27}")
    whole = step_ms + times["plain"]
    results: list[dict[str, object]] = []
    for name, taken in times.items():
        share = (taken - times["plain"]) / whole
        print(f"{name:24} {taken:7.2f} {share:27.1%}")
        results.append({"kind": name, "ms": taken, "share_of_step": share})
    return results
