"""Every kernel's benchmark runs, at sizes that the interpreter can take; scripts/gpu_check times them on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from kernels.gpu.benchmark import Benchmark

FOLDERS = sorted(path.parent.name for path in (Path(__file__).parents[2] / "kernels").glob("*/triton.py"))
SCALE = 64
MOST_RUN = 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some benchmarks read memory that nobody wrote
@pytest.mark.parametrize("folder", FOLDERS)
def test_benchmarks_run_and_say_what_they_move(folder: str, device: torch.device) -> None:
    cases = importlib.import_module(f"kernels.{folder}.cases")
    benchmarks: list[Benchmark] = cases.benchmarks(device, scale=SCALE)
    assert benchmarks
    for benchmark in benchmarks:
        assert benchmark.runs, benchmark.name
        assert benchmark.num_bytes > 0, benchmark.name
        assert benchmark.num_operations >= 0, benchmark.name
    # The interpreter takes a second for a thousand programs, so only the smallest are run.
    for benchmark in sorted(benchmarks, key=lambda benchmark: benchmark.num_bytes)[:MOST_RUN]:
        benchmark.runs[0]()


def test_there_are_kernels() -> None:
    assert len(FOLDERS) > 10
