"""Every kernel's benchmarks can be made, and the smallest one runs; scripts/gpu_check times them on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from kernels.common.triton.benchmark import Benchmark

FOLDERS = sorted(path.parent.name for path in (Path(__file__).parents[2] / "kernels" / "ops").glob("*/triton.py"))
SCALE = 64


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some benchmarks read memory that nobody wrote
@pytest.mark.parametrize("folder", FOLDERS)
def test_benchmarks_run_and_say_what_they_move(folder: str, device: torch.device) -> None:
    cases = importlib.import_module(f"kernels.ops.{folder}.cases")
    benchmarks: list[Benchmark] = cases.benchmarks(device, scale=SCALE)
    assert benchmarks
    for benchmark in benchmarks:
        assert benchmark.runs, benchmark.name
        assert benchmark.num_bytes > 0, benchmark.name
        assert benchmark.num_operations >= 0, benchmark.name
    # The interpreter takes seconds for the programs of a whole GPU, so only the smallest is run.
    min(benchmarks, key=lambda benchmark: benchmark.num_bytes).runs[0]()


def test_there_are_kernels() -> None:
    assert len(FOLDERS) > 10
