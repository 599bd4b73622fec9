"""Part of gpu_check: every kernel's time beside the least that the machine allows."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.gpu.benchmark import Benchmark
from scripts._bench.gpu_check_machine import Roofline

ROOT = Path(__file__).resolve().parents[2]
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


def measure(folder: str, device: torch.device, roofline: Roofline, timer: Timer = median_ms) -> list[dict[str, Any]]:
    """One row per benchmark of a folder; one that fails has an `error` in place of its times."""
    benchmarks: list[Benchmark] = importlib.import_module(f"kernels.{folder}.cases").benchmarks(device)
    return [time_one(folder, benchmark, roofline, timer) for benchmark in benchmarks]


def time_one(folder: str, benchmark: Benchmark, roofline: Roofline, timer: Timer) -> dict[str, Any]:
    """The row of one benchmark, its runs taken in turn."""
    row: dict[str, Any] = {"kernel": folder, "name": benchmark.name}
    floor = roofline.floor_ms(benchmark.num_bytes, benchmark.num_operations, benchmark.speed)
    turns = itertools.cycle(benchmark.runs)
    try:
        took = timer(lambda: next(turns)())
    except Exception as error:  # noqa: BLE001 - the others go on; a GPU that is lost fails them all, each by name
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return row | {"ms": took, "floor_ms": floor, "share": floor / took}
