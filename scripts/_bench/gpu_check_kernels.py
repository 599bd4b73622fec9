"""Part of gpu_check: every kernel's time beside the least that the machine allows."""

from __future__ import annotations

import gc
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kernels.gpu.benchmark import Benchmark
from scripts._bench.gpu_check_child import ROOT
from scripts._bench.gpu_check_machine import Roofline

_WARM_UP_MS = 20
_TIMED_MS = 60

Timer = Callable[[Callable[[], object]], float]
"""Median milliseconds of a call."""


def folders() -> list[str]:
    """Those of kernels/ with a triton.py."""
    return sorted(path.parent.name for path in (ROOT / "kernels").glob("*/triton.py"))


def median_ms(run: Callable[[], object]) -> float:
    """By Triton's own timer, which empties the second-level cache before each call."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=_WARM_UP_MS, rep=_TIMED_MS, return_mode="median"))


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
    found: list[Benchmark] = importlib.import_module(f"kernels.{folder}.cases").benchmarks(device)
    return found


def time_one(folder: str, benchmark: Benchmark, roofline: Roofline, timer: Timer) -> dict[str, Any]:
    """The row of one benchmark, its runs taken in turn."""
    row: dict[str, Any] = {"kernel": folder, "name": benchmark.name}
    floor = roofline.floor_ms(benchmark.num_bytes, benchmark.num_operations, benchmark.speed)
    turns = itertools.cycle(benchmark.runs)
    try:
        took = timer(lambda: next(turns)())
    except Exception as error:  # noqa: BLE001 - the others go on; a GPU that is lost fails them all, each by name
        return row | {"error": _text(error)}
    done = {"ms": took, "floor_ms": floor, "share": floor / took}
    if benchmark.num_operations:
        done["tflops"] = benchmark.num_operations / took / 1e9
    return row | done


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
