"""Parts of bench_engine: single steps of the model. Decode and prefill beside their ceiling, and sampling parameters.

The ceiling (scripts/ceiling.py) of a line is measured in turns with the engine, so that other load of the machine
affects both. The ceiling is that of the fastest measurement. The engine's figure is its median step; the fastest step
is also reported.

The cost of sampling is measured for 16 requests with different parameters and for requests with grammars, beside plain
requests and as a share of a decode step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.backends.cpu_sampling import CpuSamplingOps
from scripts import ceiling
from scripts._bench.measurements import Goal
from shared.sampling_params import SamplingParams
from worker.executor.device import Device
from worker.executor.request_rows import RequestRows
from worker.model.spec import DecoderSpec
from worker.plan import NewRow, ScheduledTokens, StepPlan
from worker.sampling.sampler import Sampler

_TURNS = 4
_DECODE_GOALS = {1: Goal(0.9)}


@dataclass(frozen=True, slots=True)
class Line:
    """Measurement of one kind of step.

    Attributes:
        kind: "decode" or "prefill".
        rows: Tokens computed in a step.
        context: Tokens of each request, including the computed ones.
        ceiling_ms: Minimum milliseconds of a step.
        times: Seconds of the engine's steps.
    """

    kind: str
    rows: int
    context: int
    ceiling_ms: float
    times: list[float]

    @property
    def goal(self) -> Goal | None:
        """Goal of the median step's share of the ceiling."""
        return _DECODE_GOALS.get(self.rows) if self.kind == "decode" else None

    def figures(self) -> dict[str, Any]:
        """Return milliseconds and the share of the ceiling, for JSON."""
        ms = statistics.median(self.times) * 1e3
        share = self.ceiling_ms / ms
        figures = {
            "kind": self.kind,
            "rows": self.rows,
            "context": self.context,
            "ms": ms,
            "fastest_ms": min(self.times) * 1e3,
            "ceiling_ms": self.ceiling_ms,
            "share": share,
            "tokens_per_second": self.rows / ms * 1e3,
        }
        return figures | (self.goal.entry(share) if self.goal is not None else {})


def measure(
    spec: DecoderSpec,
    kind: str,
    step: Callable[[], object],
    num_requests: int,
    tokens: int,
    context: int,
    seconds: float,
) -> Line:
    """Measure one kind of step.

    Args:
        spec: Sizes of the model.
        kind: "decode" or "prefill".
        step: Function that runs a step.
        num_requests: Requests of the step.
        tokens: Tokens of each request that the step computes.
        context: Tokens of each request.
        seconds: Time for the engine's steps; the ceiling takes about the same.
    """
    times: list[float] = []
    machines = [ceiling.measure(seconds / _TURNS)]
    step()
    for _ in range(_TURNS):
        times += step_seconds(step, seconds / _TURNS)
        machines.append(ceiling.measure(seconds / _TURNS))
    minimum = min(ceiling.ceiling_ms(machine, spec, num_requests, tokens, context) for machine in machines)
    return Line(kind, num_requests * tokens, context, minimum, times)


def step_seconds(step: Callable[[], object], seconds: float) -> list[float]:
    """Run steps for a time, at least one, and return the seconds of each."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def alternating_ms(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the median time of each call; the calls run in turns, so that other load affects all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for run, taken in zip(runs, times):
            start = time.perf_counter()
            run()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


HEADER = (
    f"{'':8} {'tokens':>6} {'context':>7} {'step ms':>8} {'fastest':>8} {'ceiling':>8} {'share':>6} {'tok/s':>7}  goal"
)


def text(line: Line) -> str:
    """Return a line of the table."""
    figures = line.figures()
    goal = line.goal.verdict(figures["share"]) if line.goal is not None else "-"
    return (
        f"{line.kind:8} {line.rows:6} {line.context:7} {figures['ms']:8.2f} {figures['fastest_ms']:8.2f} "
        f"{line.ceiling_ms:8.2f} {figures['share']:6.1%} {figures['tokens_per_second']:7.0f}  {goal}"
    )


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
    """Batch of 16 requests with repetitive texts, sampled from given logits."""

    def __init__(
        self, kinds: Sequence[dict[str, Any]], logits: torch.Tensor, context: int, ops: CpuSamplingOps
    ) -> None:
        vocab = logits.shape[1]
        self._rows = RequestRows(
            max_num_seqs=NUM_REQUESTS,
            max_num_tokens=NUM_REQUESTS,
            max_model_len=2 * context,
            page_size=16,
            num_groups=1,
            vocab_size=vocab,
            device=Device(),
        )
        self._sampler = Sampler(self._rows.sampling, ops)
        self._logits = logits
        text = [(7 * i) % 60 + 20 for i in range(context)]
        new = [
            NewRow(
                row=row,
                token_ids=text,
                num_prompt_tokens=context // 2,
                sampling=SamplingParams(seed=row, max_tokens=context, **kinds[row % len(kinds)]),
                eos_token_ids=[2],
                choice=0,
            )
            for row in range(NUM_REQUESTS)
        ]
        self._rows.stage(StepPlan(step=0, scheduled=[], new_rows=new))
        scheduled = [ScheduledTokens(row, context - 1, 1, True) for row in range(NUM_REQUESTS)]
        self._plan = StepPlan(step=1, scheduled=scheduled)

    def run(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Stage and sample one step; mask: [16, ceil(vocab / 32)] int32."""
        sampled = self._rows.stage(self._plan).sampled
        if mask is not None:
            sampled = replace(sampled, mask=mask)
        return self._sampler.sample(self._logits.clone(), sampled).token_ids


def sampling_runs(logits: torch.Tensor, context: int, num_threads: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time by name; logits: [16, vocab] float32."""
    ops = CpuSamplingOps(num_threads)
    ops.compile()
    plain, mixed = (SampledBatch(kinds, logits, context, ops) for kinds in ((PLAIN,), EVERY_KIND))
    few = torch.zeros((NUM_REQUESTS, -(-logits.shape[1] // 32)), dtype=torch.int32)
    few[:, 3] = 0b101100  # three tokens
    return {"plain": plain.run, "every kind": mixed.run, "grammar, few bits": lambda: plain.run(few)}


def sampling_report(step_ms: float, times: dict[str, float]) -> list[dict[str, object]]:
    """Print the table and return its lines for JSON."""
    print(f"\n{'sampling of 16 requests':24} {'ms':>7} {'added, share of a step':>27}")
    whole = step_ms + times["plain"]
    results: list[dict[str, object]] = []
    for name, taken in times.items():
        share = (taken - times["plain"]) / whole
        print(f"{name:24} {taken:7.2f} {share:27.1%}")
        results.append({"kind": name, "ms": taken, "share_of_step": share})
    return results
