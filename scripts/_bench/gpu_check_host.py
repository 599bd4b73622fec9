"""Part of gpu_check: the host's part of a decode step, scheduler included, on a model that costs the GPU little."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

from scripts._bench.gpu_check_model import SMALL, start
from scripts._bench.gpu_check_plans import random_prompts
from shared.messages import Submit
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor.build import BuiltExecutor
from worker.executor.executor import StepHandle
from worker.kv.manager import KVManager
from worker.plan import StepPlan
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.stats import Counters

COUNTS = (32, 256)
PROMPT = 16
_WARM_UP_STEPS = 16


def run(
    device: Literal["cpu", "cuda"] = "cuda", counts: Sequence[int] = COUNTS, num_steps: int = 100, **values: Any
) -> Iterator[dict[str, Any]]:
    """One row per number of requests: microseconds of each part of a step, and of the whole step by the clock."""
    length = PROMPT + num_steps + _WARM_UP_STEPS + 2
    settings = WorkerSettings(
        device=device,
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(2048, max(counts)),
        max_model_len=length,
        num_kv_pages=max(counts) * -(-length // 16),
        **values,
    )
    built = start(SMALL, settings)
    try:
        while built.use_idle_time():
            pass
        for count in counts:
            yield {"name": f"host, {count} requests"} | _measure(built, settings, count, num_steps)
    finally:
        built.executor.close()


def _measure(built: BuiltExecutor, settings: WorkerSettings, count: int, num_steps: int) -> dict[str, float]:
    scheduler = _scheduler(built, settings)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps + _WARM_UP_STEPS)
    for number, prompt in enumerate(random_prompts([PROMPT] * count, SMALL.vocab_size)):
        scheduler.add(
            Submit(
                request_id=f"r{number}",
                model="random",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=sampling,
            )
        )
    steps = [times for times in _loop(built, scheduler) if times["tokens"] == count]
    timed = steps[_WARM_UP_STEPS // 2 : -2]
    row = {name: statistics.median(step[name] for step in timed) for name in timed[0] if name != "tokens"}
    return row | {"host_us": sum(row[name] for name in ("schedule_us", "submit_us", "result_us", "apply_us"))}


def _scheduler(built: BuiltExecutor, settings: WorkerSettings) -> Scheduler:
    kv = KVManager(num_pages=built.num_pages, page_size=built.page_size, enable_prefix_caching=False)
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=built.max_model_len,
    )
    return Scheduler(config, kv, Counters(), clock=time.time)


def _loop(built: BuiltExecutor, scheduler: Scheduler) -> list[dict[str, float]]:
    """The engine's loop without messages, until all requests have ended."""
    executor = built.executor
    flights: deque[tuple[StepPlan, StepHandle]] = deque()
    steps: list[dict[str, float]] = []
    last = time.perf_counter()
    while scheduler.has_requests or flights:
        clock = [time.perf_counter()]
        plan = scheduler.schedule() if len(flights) < executor.depth else None
        clock.append(time.perf_counter())
        if plan is not None:
            flights.append((plan, executor.submit(plan)))
        clock.append(time.perf_counter())
        if not flights or (plan is not None and len(flights) < executor.depth):
            continue
        landing, handle = flights.popleft()
        while not handle.done():
            pass
        clock.append(time.perf_counter())
        result = handle.result()
        clock.append(time.perf_counter())
        scheduler.apply(landing, result, (clock[3] - last) * 1e3)
        scheduler.take_outputs()
        clock.append(time.perf_counter())
        parts = [(end - begin) * 1e6 for begin, end in pairwise(clock)]
        names = ("schedule_us", "submit_us", "wait_us", "result_us", "apply_us")
        # A step that planned nothing, at the end, would look cheap.
        tokens = float(landing.num_tokens) if plan is not None else 0.0
        steps.append(dict(zip(names, parts)) | {"step_us": (clock[-1] - last) * 1e6, "tokens": tokens})
        last = clock[-1]
    return steps
