"""Part of bench_engine: host time of a decode step, outside the model and the sampler.

The host time covers everything from socket to socket: messages, plan, staging, results, messages. It is measured with
the real model, whose time is subtracted, because caches are cold after the model has run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from scripts._bench.engine_loop import Loop, LoopError, OpClock
from scripts._bench.measurements import Goal, slope
from shared.sampling_params import SamplingParams

BASE_COUNT = 16
BASE_GOAL = Goal(0.8, is_minimum=False, form=".1f", unit=" ms")
FURTHER_GOAL = Goal(5, is_minimum=False, form=".0f", unit=" us")
_PROMPT = 16
_WARM_UP_STEPS = 4
_HEAD_START = 48
"""Upper bound of the tokens that the first request generates before the last one starts."""


def step_ms(loop: Loop, clock: OpClock, count: int, num_steps: int, vocab_size: int) -> float:
    """Return the median host time of a step in which `count` requests decode."""
    generator = Random(count)
    max_tokens = num_steps + _WARM_UP_STEPS + _HEAD_START
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    requests = []
    for number in range(count):
        # The lengths differ, so that not all requests need their next page in the same step.
        length = _PROMPT + number % 16
        requests.append(loop.submit([generator.randrange(vocab_size) for _ in range(length)], sampling))
    wait_for(loop, count)
    times: list[float] = []
    while len(times) < _WARM_UP_STEPS + num_steps:
        if loop.num_queued < count:
            raise LoopError("a request ended too early")
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


def longest(num_steps: int) -> int:
    """Return the maximum number of tokens of a request, prompt included."""
    return _PROMPT + 16 + num_steps + _WARM_UP_STEPS + _HEAD_START


def wait_for(loop: Loop, count: int, seconds: float = 10.0) -> None:
    """Step until the engine has `count` choices. Raises LoopError if it rejects some."""
    deadline = time.monotonic() + seconds
    while loop.num_queued < count:
        loop.step()
        if time.monotonic() > deadline:
            raise LoopError(f"the engine accepted {loop.num_queued} of {count} requests")


def figures(times: Mapping[int, float]) -> dict[str, Any]:
    """Return the figures for JSON from milliseconds by number of requests."""
    further_us = slope(list(times), list(times.values())) * 1e3
    found: dict[str, Any] = {"ms": dict(times), "us_per_further_request": further_us}
    if BASE_COUNT in times:
        found["at_16"] = BASE_GOAL.entry(times[BASE_COUNT])
    return found | {"further": FURTHER_GOAL.entry(further_us)}


def table(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table."""
    times, further = found["ms"], found["us_per_further_request"]
    cells = "".join(f"{ms:7.2f}" for ms in times.values())
    lines = [
        f"{'host, requests:':18}" + "".join(f"{count:>7}" for count in times) + "  us per request",
        f"{'ms per step':18}{cells}  {further:.1f} ({FURTHER_GOAL.verdict(further)})",
    ]
    if BASE_COUNT in times:
        lines.append(f"{'':10}at {BASE_COUNT}: {BASE_GOAL.verdict(times[BASE_COUNT])}")
    return lines
