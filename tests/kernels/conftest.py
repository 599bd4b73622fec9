"""Fixtures for kernels, which run on a GPU if there is one, else in Triton's interpreter in a separate test process."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from kernels.backends.cpu_sampling import CpuSamplingOps
from kernels.common.cpu.pool import use_cache_directory
from tests.fakes.numba_cache import CACHE

# Before any test module imports a kernel: numba chooses the folder of a function when it is defined.
use_cache_directory(CACHE)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device for Triton kernels with its index as a worker sets it; the CPU for the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def cpu() -> CpuSamplingOps:
    """Return compiled CPU sampling operations."""
    ops = CpuSamplingOps(2)
    ops.compile()
    return ops
