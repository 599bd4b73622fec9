"""Part of gpu_check: steps of a model of Llama-3.1-8B's shape with random weights, as shares of the roofline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from scripts._bench.gpu_check_machine import Roofline
from scripts._bench.gpu_check_model import LLAMA_8B, WeightKind, fitted, start, step_cost
from scripts._bench.gpu_check_plans import decode, num_pages, prefill_seconds, random_prompts, start_decoding
from shared.settings import WorkerSettings
from worker.executor.build import BuiltExecutor
from worker.model.spec import DecoderSpec

# (requests, context of each); the last one tells what a token of context costs.
DECODES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (1, 16384))
PREFILLS = ((1, 2048), (4, 2048))
_WARM_UP_STEPS = 6
_TIMED_STEPS = 48
_PROFILED_STEPS = 12
_REPEATS = 5
_KERNELS = 12


def settings_for(**values: Any) -> WorkerSettings:
    """Of a server for this model on one GPU."""
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 17408,
    }
    return WorkerSettings(**(defaults | values))


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
    """One row per load; one that fails or does not fit has an `error` in place of its times."""
    settings = settings or settings_for()
    if settings.device == "cuda":
        spec = fitted(spec, torch.cuda.mem_get_info()[0], kind)
    built = start(spec, settings, kind)
    kv_bytes = 2.0 if settings.kv_cache_dtype in ("auto", "bfloat16", "float16") else 1.0
    suffix = f" {kind}" + ("" if spec.num_layers == LLAMA_8B.num_layers else f", {spec.num_layers} layers")
    try:
        for count, context in decodes:
            cost = step_cost(spec, count, 1, context, kind, kv_bytes)
            floor = roofline.floor_ms(cost.num_bytes, cost.num_operations)
            name = f"decode {count} x {context}{suffix}"
            yield _row(name, partial(_decode, built, count, context, floor, num_steps))
        for count, length in prefills:
            cost = step_cost(spec, count, length, 0, kind, kv_bytes)
            floor = roofline.floor_ms(cost.num_bytes, cost.num_operations)
            yield _row(f"prefill {count} x {length}{suffix}", partial(_prefill, built, count, length, floor))
    finally:
        built.executor.close()


def _row(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"name": name} | measure()
    except Exception as error:  # noqa: BLE001 - the other loads are still worth knowing
        text = str(error).splitlines()[0] if str(error) else ""
        return {"name": name, "error": f"{type(error).__name__}: {text}"}


def _decode(built: BuiltExecutor, count: int, context: int, floor_ms: float, num_steps: int) -> dict[str, Any]:
    # Every run begins at the same context, so the pages have room for one of them.
    room = max(num_steps, _WARM_UP_STEPS, _PROFILED_STEPS) + 1
    prompts = random_prompts([context] * count, 1000)
    needed = num_pages(prompts, built.page_size, room)
    if needed > built.num_pages:
        raise ValueError(f"needs {needed} pages, the KV cache has {built.num_pages}")
    start_decoding(built.executor, prompts, built.page_size, room)
    contexts = [context] * count
    decode(built.executor, contexts, _WARM_UP_STEPS)
    while built.use_idle_time():
        pass  # all graphs are captured, as an idle worker would do
    times = decode(built.executor, contexts, num_steps)
    seen = {}
    with contextlib.suppress(RuntimeError):  # a profiler that cannot run here must not cost the times
        seen = profiled(lambda: decode(built.executor, contexts, _PROFILED_STEPS), _PROFILED_STEPS)
    took = times.step_seconds * 1e3
    return {
        "ms": took,
        "floor_ms": floor_ms,
        "share": floor_ms / took,
        "tokens_per_second": count / times.step_seconds,
        "host_us": times.host_seconds * 1e6,
        **seen,
    }


def _prefill(built: BuiltExecutor, count: int, length: int, floor_ms: float) -> dict[str, Any]:
    prompts = random_prompts([length] * count, 1000)
    start_decoding(built.executor, prompts, built.page_size, 1)
    prefill_seconds(built.executor, count, length, 2)
    took = prefill_seconds(built.executor, count, length, _REPEATS) * 1e3
    return {
        "ms": took,
        "floor_ms": floor_ms,
        "share": floor_ms / took,
        "tokens_per_second": count * length / took * 1e3,
    }


def profiled(run: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """How long the GPU did nothing, a step, and what it did. Nothing where that cannot be seen."""
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
    if not events:  # a profiler that saw nothing would tell of a GPU that is never idle
        return {}
    times = idle_times([(begin, end) for _, begin, end in events], num_steps)
    return {**times, "kernels": kernel_times(events, num_steps)}


def kernel_times(events: Sequence[tuple[str, float, float]], num_steps: int) -> list[tuple[str, float, float]]:
    """Name, launches a step and microseconds a step of the kernels that take most, from (name, begin, end)."""
    found: dict[str, list[float]] = {}
    for name, begin, end in events:
        found.setdefault(name, []).append(end - begin)
    rows = [(name, len(times) / num_steps, sum(times) / num_steps) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])[:_KERNELS]


def idle_times(intervals: Sequence[tuple[float, float]], num_steps: int) -> dict[str, float]:
    """From the times in which kernels and copies ran, in microseconds.

    Returns:
        step_gap_us: mean of the num_steps - 1 longest gaps, which are those between steps where the host is late.
        idle_us: all gaps, a step.
    """
    gaps = []
    busy_until = None
    for begin, end in sorted(intervals):
        if busy_until is not None and begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = end if busy_until is None else max(busy_until, end)
    longest = sorted(gaps, reverse=True)[: max(1, num_steps - 1)]
    return {"step_gap_us": sum(longest) / max(1, num_steps - 1), "idle_us": sum(gaps) / num_steps}
