"""Part of bench_engine: cost of the prefix cache without hits, and gain with shared prompts.

The cost is host time, which is too small to be seen in the time of a load. The same load runs with and without the
cache in turns, and the difference of the host times is divided by the time of the load. The pool of pages is small, so
that pages are evicted, as in a server that has run for a long time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts._bench.engine_loop import Loop, OpClock, Run, run_requests
from scripts._bench.measurements import Goal
from shared.sampling_params import SamplingParams

COST_GOAL = Goal(0.01, is_minimum=False)
GAIN_GOAL = Goal(3.0, form=".0f", unit="x")
SHARED = 0.9

Open = Callable[[bool], AbstractContextManager[Loop]]
"""Opens a loop with the prefix cache (True) or without it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Number of requests, requests at a time, and tokens of prompt and output of each."""

    concurrency: int
    num_requests: int
    prompt: int
    output: int

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages of the running requests, plus one third."""
        return self.concurrency * -(-(self.prompt + self.output) // page_size) * 4 // 3

    def prompts(self, generator: Random, vocab_size: int, prefix: Sequence[int] = ()) -> list[list[int]]:
        """Return random prompts with a common prefix."""
        length = self.prompt - len(prefix)
        return [[*prefix, *(generator.randrange(vocab_size) for _ in range(length))] for _ in range(self.num_requests)]


def run_load(loop: Loop, clock: OpClock, load: Load, prompts: Sequence[Sequence[int]]) -> Run:
    """Run the prompts of a load. Raises LoopError if a request fails."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=load.output)
    return run_requests(loop, prompts, [sampling] * len(prompts), load.concurrency, clock=clock)


def cost(open_loop: Open, clock: OpClock, load: Load, vocab_size: int, rounds: int) -> dict[str, Any]:
    """Measure the cost of the cache for a load without hits."""
    generator = Random(1)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    with ExitStack() as stack:
        loops = {caching: stack.enter_context(open_loop(caching)) for caching in runs}
        for number in range(rounds + 1):
            for caching, loop in loops.items():
                run = run_load(loop, clock, load, load.prompts(generator, vocab_size))
                if number:  # the first round fills the pool
                    runs[caching].append(run)
        counters = loops[True].counters
        hits, evictions = counters.prefix_cache_hits_total, counters.prefix_cache_evictions_total
    enabled, disabled = ([run.host_seconds for run in runs[caching]] for caching in (True, False))
    share = cost_share(enabled, disabled, [run.seconds for run in runs[False]])
    return {
        "host_ms_with": statistics.median(enabled) * 1e3,
        "host_ms_without": statistics.median(disabled) * 1e3,
        "load_ms": statistics.median(run.seconds for run in runs[False]) * 1e3,
        "hits": hits,
        "evictions": evictions,
        "share": share,
    } | COST_GOAL.entry(share)


def cost_share(host_with: Sequence[float], host_without: Sequence[float], whole: Sequence[float]) -> float:
    """Return the additional host time as a share of the load's time without the cache; medians."""
    return (statistics.median(host_with) - statistics.median(host_without)) / statistics.median(whole)


def gain(open_loop: Open, clock: OpClock, load: Load, vocab_size: int) -> dict[str, Any]:
    """Measure the gain for prompts whose first 90 % an earlier request has left in the cache."""
    generator = Random(2)
    prefix = [generator.randrange(vocab_size) for _ in range(round(load.prompt * SHARED))]
    prompts = load.prompts(generator, vocab_size, prefix)
    seconds: dict[bool, float] = {}
    hit_rate = 0.0
    for caching in (False, True):
        with open_loop(caching) as loop:
            run_load(loop, clock, load, [[*prefix, 1]])
            seconds[caching] = run_load(loop, clock, load, prompts).seconds
            if caching:
                hit_rate = loop.counters.prefix_cache_hits_total / loop.counters.prefix_cache_queries_total
    ratio = seconds[False] / seconds[True]
    tokens = load.num_requests * load.output
    return {
        "output_tokens_per_second_with": tokens / seconds[True],
        "output_tokens_per_second_without": tokens / seconds[False],
        "found": hit_rate,
        "ratio": ratio,
    } | GAIN_GOAL.entry(ratio)


def table(costs: dict[str, Any], gains: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    share, ratio = costs["share"], gains["ratio"]
    times = f"{costs['host_ms_with']:.1f} ms with it, {costs['host_ms_without']:.1f} without"
    speed, plain_speed = (gains[f"output_tokens_per_second_{name}"] for name in ("with", "without"))
    return [
        f"prefix cache, no hits: host {times}, of {costs['load_ms']:.0f} ms: {share:+.2%} ({COST_GOAL.verdict(share)})",
        f"prefix cache, {SHARED:.0%} shared: output tok/s {speed:.0f} with it, {plain_speed:.0f} without: {ratio:.2f}x",
        f"{'':8}({GAIN_GOAL.verdict(ratio)}; {gains['found']:.0%} of the prompt tokens found)",
    ]
