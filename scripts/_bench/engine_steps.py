"""Part of bench_engine: decode steps and prefill as shares of the ceiling of scripts/ceiling.py.

A line's ceiling is measured around it: first each kernel for a moment, then the best of them in turns with the engine,
so that what else the machine does falls on both alike. Of the ceiling the fastest pass counts, of the engine the median
step; its fastest step is told too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scripts._bench.goals import Goal
from scripts.ceiling import Ceiling, Matrices, best, fastest_seconds, time_kernels

_TURNS = 4
_CHUNK_ROWS = 512
"""Rows at which the ceiling of longer prompts is measured: none of the kernels gains by more."""
DECODE_GOALS = {1: Goal(0.8), 4: Goal(0.7), 8: Goal(0.7), 16: Goal(0.7)}
PREFILL_GOALS = {128: Goal(0.8), 512: Goal(0.8), 2048: Goal(0.7)}


@dataclass(frozen=True, slots=True)
class Line:
    """One number of rows.

    Attributes:
        kind: decode or prefill.
        tokens: that a step computes; context: tokens of each request with them.
        ceiling: of as many rows, or of _CHUNK_ROWS where there are more.
        times: seconds of the engine's steps.
    """

    kind: str
    tokens: int
    context: int
    ceiling: Ceiling
    times: list[float]

    @property
    def ceiling_seconds(self) -> float:
        """What the products of one step take at best."""
        return self.ceiling.layers_seconds * self.tokens / self.ceiling.rows + self.ceiling.head_seconds

    @property
    def goal(self) -> Goal | None:
        """Of the median's share."""
        return (DECODE_GOALS if self.kind == "decode" else PREFILL_GOALS).get(self.tokens)

    def figures(self) -> dict[str, Any]:
        """For JSON: milliseconds, and shares of the ceiling."""
        median, fastest = statistics.median(self.times), min(self.times)
        share = self.ceiling_seconds / median
        figures = {
            "kind": self.kind,
            "rows": self.tokens,
            "context": self.context,
            "ms": median * 1e3,
            "fastest_ms": fastest * 1e3,
            "ceiling_ms": self.ceiling_seconds * 1e3,
            "share": share,
            "fastest_share": self.ceiling_seconds / fastest,
            "tokens_per_second": self.tokens / median,
            "kernel": self.ceiling.kernel.name,
            "head_kernel": self.ceiling.head_kernel.name,
        }
        return figures | (self.goal.entry(share) if self.goal is not None else {})


@torch.inference_mode()
def measure(
    matrices: Matrices,
    kind: str,
    step: Callable[[], object],
    *,
    tokens: int,
    context: int,
    head_rows: int,
    seconds: float,
) -> Line:
    """One line.

    Args:
        step: the engine's, of so many tokens, `head_rows` of which want logits.
        seconds: of the engine's steps, and about as much for the ceiling.
    """
    rows = min(tokens, _CHUNK_ROWS)
    ceiling = best(time_kernels(matrices, rows, head_rows, seconds / 8), rows, head_rows)
    layers, head = matrices.layers(ceiling.kernel, rows), matrices.head(ceiling.head_kernel, head_rows)
    times: list[float] = []
    step()
    for _ in range(_TURNS):
        again = fastest_seconds(layers, seconds / 3 / _TURNS, passes=1)
        ceiling = ceiling.lowered(again, fastest_seconds(head, seconds / 12 / _TURNS, passes=1))
        times += step_seconds(step, seconds / _TURNS)
    return Line(kind, tokens, context, ceiling, times)


def step_seconds(step: Callable[[], object], seconds: float) -> list[float]:
    """Of each step, one at least, for so long."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


HEADER = (
    f"{'':8} {'tokens':>6} {'context':>7} {'step ms':>8} {'fastest':>8} {'ceiling':>8} {'share':>6} {'fastest':>7} "
    f"{'tok/s':>7}  goal"
)


def text(line: Line) -> str:
    """A line of the table."""
    figures = line.figures()
    goal = line.goal.verdict(figures["share"]) if line.goal is not None else "-"
    return (
        f"{line.kind:8} {line.tokens:6} {line.context:7} {figures['ms']:8.2f} {figures['fastest_ms']:8.2f} "
        f"{figures['ceiling_ms']:8.2f} {figures['share']:6.1%} {figures['fastest_share']:7.1%} "
        f"{figures['tokens_per_second']:7.0f}  {goal}"
    )
