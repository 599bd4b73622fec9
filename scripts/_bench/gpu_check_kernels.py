"""Part of gpu_check: every kernel's time beside the least that the machine allows."""

from __future__ import annotations

import gc
import importlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kernels.common.triton.benchmark import Benchmark
from scripts._bench.gpu_check_child import ROOT
from scripts._bench.gpu_check_machine import Roofline

_LEAST_LAUNCHES = 16
_REPLAYS = 7
_TIMED_MS = 40

Run = Callable[[], object]
Timer = Callable[[Sequence[Run]], float]
"""Milliseconds of a call, of several that do the same on different memory."""


def folders() -> list[str]:
    """Those of kernels/ with a triton.py."""
    return sorted(path.parent.name for path in (ROOT / "kernels" / "ops").glob("*/triton.py"))


def median_ms(runs: Sequence[Run]) -> float:
    """In a graph, in turn and back to back, as kernels of a decode step follow one another.

    Launched one by one, most kernels take the GPU less time than the host, whose time it then was that was measured.
    That the memory differs from call to call keeps it out of the second-level cache. What a graph cannot hold is timed
    by Triton's timer.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    turns = -(-_LEAST_LAUNCHES // len(runs))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for run in list(runs) * turns:
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return _launched_ms(runs)
    first = _elapsed_ms(graph.replay)
    replays = max(_REPLAYS, min(100, int(_TIMED_MS / max(first, 1e-3))))
    return statistics.median(_elapsed_ms(graph.replay) for _ in range(replays)) / (turns * len(runs))


def _launched_ms(runs: Sequence[Run]) -> float:
    """By Triton's own timer, which empties the second-level cache before each call; the host's time is in it."""
    from triton.testing import do_bench

    turns = itertools.cycle(runs)
    return float(do_bench(lambda: next(turns)(), warmup=20, rep=_TIMED_MS, return_mode="median"))


def _elapsed_ms(run: Run) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def compile_all(folder: str, device: torch.device) -> None:
    """Runs each benchmark of a folder once, so that Triton's cache has its kernels."""
    for benchmark in _benchmarks(folder, device):
        benchmark.runs[0]()
        torch.cuda.synchronize()


def measure_all(folders: Sequence[str], device: torch.device, roofline: Roofline) -> Iterator[dict[str, Any]]:
    """The rows of each folder after one that says that it begins. Raises where the GPU has failed for this process."""
    for folder in folders:
        yield {"begin": folder}
        try:
            benchmarks = _benchmarks(folder, device)
        except Exception as error:  # noqa: BLE001 - the other folders are still worth knowing
            yield {"name": folder, "error": _text(error)}
            benchmarks = []
        for benchmark in benchmarks:
            yield time_one(folder, benchmark, roofline, median_ms)
            torch.cuda.synchronize()
        del benchmarks
        gc.collect()
        torch.cuda.empty_cache()


def _benchmarks(folder: str, device: torch.device) -> list[Benchmark]:
    found: list[Benchmark] = importlib.import_module(f"kernels.ops.{folder}.cases").benchmarks(device)
    return found


def time_one(folder: str, benchmark: Benchmark, roofline: Roofline, timer: Timer) -> dict[str, Any]:
    """The row of one benchmark."""
    row: dict[str, Any] = {"kernel": folder, "name": benchmark.name}
    floor = roofline.floor_ms(benchmark.num_bytes, benchmark.num_operations, benchmark.speed)
    try:
        took = timer(benchmark.runs)
    except Exception as error:  # noqa: BLE001 - the others go on; a GPU that is lost fails them all, each by name
        return row | {"error": _text(error)}
    done = {"ms": took, "floor_ms": floor, "share": floor / took}
    if benchmark.num_operations:
        done["tflops"] = benchmark.num_operations / took / 1e9
    return row | done


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
