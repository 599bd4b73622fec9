"""Part of gpu_check: steps of an 8B model as shares of the roofline, and the host time of a decode step."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch

from scripts._bench.gpu_check_child import error_text
from scripts._bench.gpu_check_model import LLAMA_8B, SMALL, WeightKind, fitted, random_executor, step_cost
from scripts._bench.gpu_check_plans import decode, num_pages, prefill_seconds, random_prompts, start_decoding
from scripts._bench.measurements import Roofline
from shared.messages import Submit
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor.build import BuiltExecutor
from worker.executor.executor import StepHandle
from worker.kv.manager import KVManager
from worker.model.spec import DecoderSpec
from worker.plan import StepPlan
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.stats import Counters

# (requests, context of each); the last one gives the cost of a token of context.
DECODES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (1, 16384))
PREFILLS = ((1, 2048), (4, 2048))
HOST_COUNTS = (32, 256)
_HOST_PROMPT = 16
_HOST_WARM_UP_STEPS = 16
_WARM_UP_STEPS = 6
_TIMED_STEPS = 48
_PROFILED_STEPS = 12
_REPEATS = 5
_REPORTED_KERNELS = 12


def run(
    roofline: Roofline,
    kind: WeightKind = "bf16",
    *,
    spec: DecoderSpec = LLAMA_8B,
    settings: WorkerSettings | None = None,
    decodes: Sequence[tuple[int, int]] = DECODES,
    prefills: Sequence[tuple[int, int]] = PREFILLS,
    num_steps: int = _TIMED_STEPS,
) -> Iterator[dict[str, Any]]:
    """Yield one row per load; a load that fails or does not fit has an `error` instead of times."""
    settings = settings or WorkerSettings(
        device="cuda", dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=17408
    )
    if settings.device == "cuda":
        spec = fitted(spec, torch.cuda.mem_get_info()[0], kind)
    built = random_executor(spec, settings, kind)
    kv_bytes = 2.0 if settings.kv_cache_dtype in ("auto", "bfloat16", "float16") else 1.0
    suffix = f" {kind}" + ("" if spec.num_layers == LLAMA_8B.num_layers else f", {spec.num_layers} layers")
    try:
        for count, context in decodes:
            cost = step_cost(spec, count, 1, context, kind, kv_bytes)
            floor = roofline.floor_ms(cost.num_bytes, cost.num_operations)
            name = f"decode {count} x {context}{suffix}"
            yield _row(name, floor, partial(_decode, built, count, context, num_steps))
        for count, length in prefills:
            cost = step_cost(spec, count, length, 0, kind, kv_bytes)
            floor = roofline.floor_ms(cost.num_bytes, cost.num_operations)
            yield _row(f"prefill {count} x {length}{suffix}", floor, partial(_prefill, built, count, length))
    finally:
        built.executor.close()


def _row(name: str, floor_ms: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        figures = measure()
    except Exception as error:  # noqa: BLE001 - the other loads are measured nevertheless
        return {"name": name, "error": error_text(error)}
    return {"name": name, "floor_ms": floor_ms, "share": floor_ms / figures["ms"]} | figures


def _decode(built: BuiltExecutor, count: int, context: int, num_steps: int) -> dict[str, Any]:
    # Every run begins at the same context, so the pages have room for one run.
    room = max(num_steps, _WARM_UP_STEPS, _PROFILED_STEPS) + 1
    prompts = random_prompts([context] * count, 1000)
    needed = num_pages(prompts, built.page_size, room)
    if needed > built.num_pages:
        raise ValueError(f"needs {needed} pages, the KV cache has {built.num_pages}")
    start_decoding(built.executor, prompts, built.page_size, room)
    contexts = [context] * count
    decode(built.executor, contexts, _WARM_UP_STEPS)
    while built.use_idle_time():
        pass  # capture all graphs, as an idle worker does
    times = decode(built.executor, contexts, num_steps)
    profile = {}
    with contextlib.suppress(RuntimeError):  # the profiler may not be available
        profile = profiled(lambda: decode(built.executor, contexts, _PROFILED_STEPS), _PROFILED_STEPS)
    return {
        "ms": times.step_seconds * 1e3,
        "tokens_per_second": count / times.step_seconds,
        "host_us": times.host_seconds * 1e6,
        **profile,
    }


def _prefill(built: BuiltExecutor, count: int, length: int) -> dict[str, Any]:
    prompts = random_prompts([length] * count, 1000)
    start_decoding(built.executor, prompts, built.page_size, 1)
    prefill_seconds(built.executor, count, length, 2)
    seconds = prefill_seconds(built.executor, count, length, _REPEATS)
    return {"ms": seconds * 1e3, "tokens_per_second": count * length / seconds}


def profiled(run: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Return the idle times and kernels of a step; empty if the profiler sees no GPU activity."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    if not events:  # otherwise the GPU would seem never to be idle
        return {}
    times = idle_times([(begin, end) for _, begin, end in events], num_steps)
    return {**times, "kernels": kernel_times(events, num_steps)}


def kernel_times(events: Sequence[tuple[str, float, float]], num_steps: int) -> list[tuple[str, float, float]]:
    """Return (name, launches per step, microseconds per step) of the slowest kernels, from (name, begin, end)."""
    found: dict[str, list[float]] = {}
    for name, begin, end in events:
        found.setdefault(name, []).append(end - begin)
    rows = [(name, len(times) / num_steps, sum(times) / num_steps) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])[:_REPORTED_KERNELS]


def idle_times(intervals: Sequence[tuple[float, float]], num_steps: int) -> dict[str, float]:
    """Compute idle times from the (begin, end) of kernels and copies, in microseconds.

    Returns:
        step_gap_us: Mean of the num_steps - 1 longest gaps, which are those between steps if the host is late.
        idle_us: Sum of all gaps per step.
    """
    gaps = []
    busy_until = None
    for begin, end in sorted(intervals):
        if busy_until is not None and begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = end if busy_until is None else max(busy_until, end)
    longest = sorted(gaps, reverse=True)[: max(1, num_steps - 1)]
    return {"step_gap_us": sum(longest) / max(1, num_steps - 1), "idle_us": sum(gaps) / num_steps}


def run_host(
    device: Literal["cpu", "cuda"] = "cuda", counts: Sequence[int] = HOST_COUNTS, num_steps: int = 100, **values: Any
) -> Iterator[dict[str, Any]]:
    """Yield one row per number of requests: microseconds of each part of a step, scheduler included.

    The small model is used, so that the host limits the speed.
    """
    length = _HOST_PROMPT + num_steps + _HOST_WARM_UP_STEPS + 2
    settings = WorkerSettings(
        device=device,
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(2048, max(counts)),
        max_model_len=length,
        num_kv_pages=max(counts) * -(-length // 16),
        **values,
    )
    built = random_executor(SMALL, settings)
    try:
        while built.use_idle_time():
            pass
        for count in counts:
            yield {"name": f"host, {count} requests"} | _host_times(built, settings, count, num_steps)
    finally:
        built.executor.close()


def _host_times(built: BuiltExecutor, settings: WorkerSettings, count: int, num_steps: int) -> dict[str, float]:
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=built.max_model_len,
    )
    kv = KVManager(num_pages=built.num_pages, page_size=built.page_size, enable_prefix_caching=False)
    scheduler = Scheduler(config, kv, Counters(), clock=time.time)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps + _HOST_WARM_UP_STEPS)
    for number, prompt in enumerate(random_prompts([_HOST_PROMPT] * count, SMALL.vocab_size)):
        scheduler.add(
            Submit(
                request_id=f"r{number}",
                model="random",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=sampling,
            )
        )
    steps = [times for times in _timed_steps(built, scheduler) if times["tokens"] == count]
    timed = steps[_HOST_WARM_UP_STEPS // 2 : -2]
    row = {name: statistics.median(step[name] for step in timed) for name in timed[0] if name != "tokens"}
    return row | {"host_us": sum(row[name] for name in ("schedule_us", "submit_us", "result_us", "apply_us"))}


def _timed_steps(built: BuiltExecutor, scheduler: Scheduler) -> list[dict[str, float]]:
    """Run the engine's loop without messages until all requests have ended."""
    executor = built.executor
    in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
    steps: list[dict[str, float]] = []
    last = time.perf_counter()
    while scheduler.has_requests or in_flight:
        clock = [time.perf_counter()]
        plan = scheduler.schedule() if len(in_flight) < executor.depth else None
        clock.append(time.perf_counter())
        if plan is not None:
            in_flight.append((plan, executor.submit(plan)))
        clock.append(time.perf_counter())
        if not in_flight or (plan is not None and len(in_flight) < executor.depth):
            continue
        finished, handle = in_flight.popleft()
        while not handle.done():
            pass
        clock.append(time.perf_counter())
        result = handle.result()
        clock.append(time.perf_counter())
        scheduler.apply(finished, result, (clock[3] - last) * 1e3)
        scheduler.take_outputs()
        clock.append(time.perf_counter())
        parts = [(end - begin) * 1e6 for begin, end in pairwise(clock)]
        names = ("schedule_us", "submit_us", "wait_us", "result_us", "apply_us")
        # Steps at the end that planned nothing are excluded by their number of tokens, 0.
        tokens = float(finished.num_tokens) if plan is not None else 0.0
        steps.append(dict(zip(names, parts)) | {"step_us": (clock[-1] - last) * 1e6, "tokens": tokens})
        last = clock[-1]
    return steps
