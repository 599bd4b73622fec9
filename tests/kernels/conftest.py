"""Kernels run on a GPU where there is one, else in Triton's interpreter; so this folder has a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from kernels.backends.cpu_sampling import CpuSamplingOps
from kernels.common.cpu.pool import use_cache_directory


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache() -> None:
    """Compiled kernels of the CPU are kept where numba would keep them, but by the hash of all sources."""
    use_cache_directory(Path(__file__).parents[2] / ".pytest_cache" / "numba")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run, with the index that a worker gives: tensors of the CPU in the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def cpu() -> CpuSamplingOps:
    """Compiled sampling operations of the CPU."""
    ops = CpuSamplingOps(2)
    ops.compile()
    return ops
