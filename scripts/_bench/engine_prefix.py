"""Part of bench_engine: what the prefix cache costs where it finds nothing, and what it saves where prompts share most.

What it costs is host time, too little to be seen in the time of a load: of the same load with and without the cache, in
turns, the difference of the host's time (all but model and sampler) is taken, as a share of the whole load's. The pool
of pages is small, so that pages are evicted as in a server that has run for long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts._bench.engine_loop import Loop, LoopError, OpClock
from scripts._bench.goals import Goal
from shared.messages import FinishReason
from shared.sampling_params import SamplingParams

COST_GOAL = Goal(0.01, least=False)
GAIN_GOAL = Goal(3.0, form=".0f", unit="x")
SHARED = 0.9

Open = Callable[[bool], AbstractContextManager[Loop]]
"""A loop with the prefix cache or without it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one size, so many at a time."""

    concurrency: int
    num_requests: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of a load, and those of them that were neither model nor sampler."""

    seconds: float
    host_seconds: float


def run_load(loop: Loop, clock: OpClock, load: Load, prompts: Sequence[Sequence[int]]) -> Run:
    """Closed loop: the next request comes when one has ended. Raises LoopError where one fails."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=load.output)
    waiting = list(reversed(prompts))
    num_left = len(prompts)
    for _ in range(min(load.concurrency, len(waiting))):
        loop.submit(waiting.pop(), sampling)
    # What clients do, here in the same thread, is not the engine's time.
    seconds = host = 0.0
    while num_left:
        clock.seconds = 0.0
        begin = time.perf_counter()
        loop.step()
        taken = time.perf_counter() - begin
        seconds, host = seconds + taken, host + taken - clock.seconds
        for output in loop.receive():
            if output.finish is None:
                continue
            if output.finish.reason is not FinishReason.LENGTH:
                raise LoopError(f"a request ended with {output.finish.reason}: {output.finish.message}")
            num_left -= 1
            if waiting:
                loop.submit(waiting.pop(), sampling)
    return Run(seconds, host)


def pages_of(load: Load, page_size: int) -> int:
    """Pages that the running requests take, and a third more."""
    return load.concurrency * -(-(load.prompt + load.output) // page_size) * 4 // 3


def prompts_of(load: Load, generator: Random, vocab_size: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Random ones that begin alike."""
    return [
        [*prefix, *(generator.randrange(vocab_size) for _ in range(load.prompt - len(prefix)))]
        for _ in range(load.num_requests)
    ]


def cost(open_loop: Open, clock: OpClock, load: Load, vocab_size: int, rounds: int) -> dict[str, Any]:
    """Of a load without hits."""
    generator = Random(1)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    with ExitStack() as stack:
        loops = {caching: stack.enter_context(open_loop(caching)) for caching in runs}
        for number in range(rounds + 1):
            for caching, loop in loops.items():
                run = run_load(loop, clock, load, prompts_of(load, generator, vocab_size))
                if number:  # the first fills the pool
                    runs[caching].append(run)
        counters = loops[True].counters
        hits, evictions = counters.prefix_cache_hits_total, counters.prefix_cache_evictions_total
    with_it, without = ([run.host_seconds for run in runs[caching]] for caching in (True, False))
    share = cost_share(with_it, without, [run.seconds for run in runs[False]])
    return {
        "host_ms_with": statistics.median(with_it) * 1e3,
        "host_ms_without": statistics.median(without) * 1e3,
        "load_ms": statistics.median(run.seconds for run in runs[False]) * 1e3,
        "hits": hits,
        "evictions": evictions,
        "share": share,
    } | COST_GOAL.entry(share)


def cost_share(host_with: Sequence[float], host_without: Sequence[float], whole: Sequence[float]) -> float:
    """The host's additional time, as a share of what the load takes without the cache; medians."""
    return (statistics.median(host_with) - statistics.median(host_without)) / statistics.median(whole)


def gain(open_loop: Open, clock: OpClock, load: Load, vocab_size: int) -> dict[str, Any]:
    """Of prompts that share their first 90 %, which an earlier request has left in the cache."""
    generator = Random(2)
    prefix = [generator.randrange(vocab_size) for _ in range(round(load.prompt * SHARED))]
    prompts = prompts_of(load, generator, vocab_size, prefix)
    seconds: dict[bool, float] = {}
    found = 0.0
    for caching in (False, True):
        with open_loop(caching) as loop:
            run_load(loop, clock, load, [[*prefix, 1]])
            seconds[caching] = run_load(loop, clock, load, prompts).seconds
            if caching:
                found = loop.counters.prefix_cache_hits_total / loop.counters.prefix_cache_queries_total
    ratio = seconds[False] / seconds[True]
    tokens = load.num_requests * load.output
    return {
        "output_tokens_per_second_with": tokens / seconds[True],
        "output_tokens_per_second_without": tokens / seconds[False],
        "found": found,
        "ratio": ratio,
    } | GAIN_GOAL.entry(ratio)


def table(costs: dict[str, Any], gains: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    found = f"{gains['found']:.0%} of the prompts' tokens found"
    share, ratio = costs["share"], gains["ratio"]
    times = f"{costs['host_ms_with']:.1f} ms with it, {costs['host_ms_without']:.1f} without"
    verdict = f"{GAIN_GOAL.verdict(ratio)}; {found}"
    with_it, without = (gains[f"output_tokens_per_second_{name}"] for name in ("with", "without"))
    return [
        f"prefix cache, no hits: host {times}, of {costs['load_ms']:.0f} ms: {share:+.2%} ({COST_GOAL.verdict(share)})",
        f"prefix cache, {SHARED:.0%} shared: output tok/s {with_it:.0f} with it, {without:.0f} without: {ratio:.2f}x",
        f"{'':8}({verdict})",
    ]
