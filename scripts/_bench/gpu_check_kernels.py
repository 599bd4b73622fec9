"""Part of gpu_check: the roofline of the GPU, and the time of every kernel beside it."""

from __future__ import annotations

import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from kernels.common.triton.compilations import Benchmark
from scripts._bench.gpu_check_child import ROOT, error_text
from scripts._bench.measurements import Roofline

# Part of the device name -> bytes per second, bfloat16 operations per second that the vendor's library reaches.
KNOWN = {"H200": (4.8e12, 790e12)}

_COPY_BYTES = 2 << 30
_PRODUCT_SIZE = 8192
_REPEATS = 10
_MIN_LAUNCHES = 16
_MIN_REPLAYS = 7
_TIMED_MS = 40

Run = Callable[[], object]
Timer = Callable[[Sequence[Run]], float]
"""Returns the milliseconds of a call, given several calls that do the same work on different memory."""


def roofline() -> Roofline:
    """Return the roofline of the current GPU."""
    name = torch.cuda.get_device_name()
    for key, (bandwidth, operations) in KNOWN.items():
        if key in name:
            return Roofline(name, bandwidth, operations, measured=False)
    return Roofline(name, *measure_machine(), measured=True)


def describe() -> dict[str, Any]:
    """Return the roofline, the rates of a copy and a product now, and the versions of the libraries."""
    import triton

    bandwidth, operations = measure_machine()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return asdict(roofline()) | {"copy_bandwidth": bandwidth, "product_operations": operations} | versions


def measure_machine() -> tuple[float, float]:
    """Return the bytes per second of a copy and the operations per second of a large bfloat16 product."""
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_seconds = _fastest_seconds(lambda: target.copy_(source))
    size = _PRODUCT_SIZE
    left = source[: size * size].view(size, size)
    product_seconds = _fastest_seconds(lambda: left @ left)
    return 2 * _COPY_BYTES / copy_seconds, 2 * size**3 / product_seconds


def _fastest_seconds(run: Run) -> float:
    run()
    seconds = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def folders() -> list[str]:
    """Return the folders of kernels/ops that have a triton.py."""
    return sorted(path.parent.name for path in (ROOT / "kernels" / "ops").glob("*/triton.py"))


def median_ms(runs: Sequence[Run]) -> float:
    """Return the median milliseconds of a call, measured in a CUDA graph with the calls back to back.

    Launched one by one, most kernels take less time on the GPU than their launch on the host, and the host would be
    measured. The calls use different memory, so that it is not in the L2 cache. Calls that cannot be captured are timed
    by Triton's do_bench, which flushes the L2 cache before each call and includes the host's time.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    rounds = -(-_MIN_LAUNCHES // len(runs))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for run in list(runs) * rounds:
                run()
    except RuntimeError:
        from triton.testing import do_bench

        torch.cuda.synchronize()
        turns = itertools.cycle(runs)
        return float(do_bench(lambda: next(turns)(), warmup=20, rep=_TIMED_MS, return_mode="median"))
    first = _elapsed_ms(graph.replay)
    replays = max(_MIN_REPLAYS, min(100, int(_TIMED_MS / max(first, 1e-3))))
    return statistics.median(_elapsed_ms(graph.replay) for _ in range(replays)) / (rounds * len(runs))


def _elapsed_ms(run: Run) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def compile_all(folder: str, device: torch.device) -> None:
    """Run each benchmark of a folder once, so that its kernels are in Triton's cache."""
    for benchmark in _benchmarks(folder, device):
        benchmark.runs[0]()
        torch.cuda.synchronize()


def measure_all(folders: Sequence[str], device: torch.device, roofline: Roofline) -> Iterator[dict[str, Any]]:
    """Yield a row {"begin": folder} and the rows of its benchmarks, for each folder.

    Raises if the GPU has failed for this process.
    """
    for folder in folders:
        yield {"begin": folder}
        try:
            benchmarks = _benchmarks(folder, device)
        except Exception as error:  # noqa: BLE001 - the other folders are measured nevertheless
            yield {"name": folder, "error": error_text(error)}
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
    """Return the row of one benchmark."""
    row: dict[str, Any] = {"kernel": folder, "name": benchmark.name}
    floor = roofline.floor_ms(benchmark.num_bytes, benchmark.num_operations, benchmark.speed)
    try:
        ms = timer(benchmark.runs)
    except Exception as error:  # noqa: BLE001 - the others go on; after the loss of the GPU each fails by name
        return row | {"error": error_text(error)}
    row |= {"ms": ms, "floor_ms": floor, "share": floor / ms}
    if benchmark.num_operations:
        row["tflops"] = benchmark.num_operations / ms / 1e9
    return row
