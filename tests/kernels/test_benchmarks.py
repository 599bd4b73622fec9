"""Construction of every kernel's benchmarks, and a run of the smallest; scripts/gpu_check times them on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from kernels.common.triton.compilations import Benchmark

FOLDERS = sorted(path.parent.name for path in (Path(__file__).parents[2] / "kernels" / "ops").glob("*/triton.py"))
SCALE = 64


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some benchmarks read uninitialized memory
@pytest.mark.parametrize("folder", FOLDERS)
def test_benchmarks_run_and_report_bytes(folder: str, device: torch.device) -> None:
    cases = importlib.import_module(f"kernels.ops.{folder}.cases")
    benchmarks: list[Benchmark] = cases.benchmarks(device, scale=SCALE)
    assert benchmarks
    for benchmark in benchmarks:
        assert benchmark.runs, benchmark.name
        assert benchmark.num_bytes > 0, benchmark.name
        assert benchmark.num_operations >= 0, benchmark.name
    # The interpreter takes seconds for the programs of a whole GPU, so only the smallest benchmark is run.
    min(benchmarks, key=lambda benchmark: benchmark.num_bytes).runs[0]()


def test_kernel_list_is_not_empty() -> None:
    assert len(FOLDERS) > 10
