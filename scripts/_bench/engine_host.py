"""Part of bench_engine: what a decode step costs beside the model and the sampler.

That is everything from the socket to the socket: messages, plan, staging, results, messages. It is measured beside the
model, whose time is taken out, and beside one that computes nothing: the difference is what caches that the model has
filled, and threads that it has woken, cost the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from scripts._bench.engine_loop import Loop, LoopError, OpClock
from scripts._bench.goals import Goal, slope
from shared.sampling_params import SamplingParams

BASE_COUNT = 16
BASE_GOAL = Goal(0.8, least=False, form=".1f", unit=" ms")
FURTHER_GOAL = Goal(10, least=False, form=".0f", unit=" us")
_PROMPT = 16
_WARM_UP_STEPS = 4
_HEAD_START = 48


def step_ms(loop: Loop, clock: OpClock, count: int, num_steps: int, vocab_size: int) -> float:
    """The median host time of a step in which `count` requests decode."""
    generator = Random(count)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_tokens(num_steps))
    requests = []
    for number in range(count):
        # Of different lengths, so that they do not all need their next page in the same step.
        length = _PROMPT + number % 16
        requests.append(loop.submit([generator.randrange(vocab_size) for _ in range(length)], sampling))
    wait_for(loop, count)
    times: list[float] = []
    while len(times) < _WARM_UP_STEPS + num_steps:
        if loop.num_queued < count:
            raise LoopError("a request ended before its time")
        decodes = loop.engine.scheduler.num_waiting_tokens() == 0
        clock.seconds = 0.0
        begin = time.perf_counter()
        loop.step()
        if decodes:
            times.append(time.perf_counter() - begin - clock.seconds)
        loop.receive()
    for request_id in requests:
        loop.cancel(request_id)
    while loop.num_queued:
        loop.step()
        loop.receive()
    return statistics.median(times[_WARM_UP_STEPS:]) * 1e3


def _tokens(num_steps: int) -> int:
    """What a request may generate: with what the first have when the last begin."""
    return num_steps + _WARM_UP_STEPS + _HEAD_START


def longest(num_steps: int) -> int:
    """Tokens that the longest request comes to."""
    return _PROMPT + 16 + _tokens(num_steps)


def wait_for(loop: Loop, count: int, seconds: float = 10.0) -> None:
    """Until the engine has that many choices. Raises LoopError where it refuses some."""
    deadline = time.monotonic() + seconds
    while loop.num_queued < count:
        loop.step()
        if time.monotonic() > deadline:
            raise LoopError(f"{loop.num_queued} of {count} requests came through")


def figures(times: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """For JSON; times: name of the model -> number of requests -> milliseconds."""
    entries = []
    for name, by_count in times.items():
        further_us = slope(list(by_count), list(by_count.values())) * 1e3
        entry: dict[str, Any] = {"beside": name, "ms": dict(by_count), "us_per_further_request": further_us}
        if BASE_COUNT in by_count:
            entry["at_16"] = BASE_GOAL.entry(by_count[BASE_COUNT])
        entries.append(entry | {"further": FURTHER_GOAL.entry(further_us)})
    return entries


def table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table."""
    counts = list(entries[0]["ms"])
    lines = [f"{'host, ms a step of':28}" + "".join(f"{count:>7}" for count in counts) + "  us per further request"]
    for entry in entries:
        cells = "".join(f"{value:7.2f}" for value in entry["ms"].values())
        further = entry["us_per_further_request"]
        lines.append(f"beside {entry['beside']:21}{cells}  {further:.1f} ({FURTHER_GOAL.verdict(further)})")
        if BASE_COUNT in entry["ms"]:
            lines.append(f"{'':10}at {BASE_COUNT}: {BASE_GOAL.verdict(entry['ms'][BASE_COUNT])}")
    return lines
