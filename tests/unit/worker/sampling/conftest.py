"""Fixtures of the sampling tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.backends.cpu_sampling import CpuSamplingOps
from kernels.backends.reference import SamplingOps


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """Use one thread, which halves the time of tests with a small vocabulary."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="package")
def compiled_ops() -> CpuSamplingOps:
    ops = CpuSamplingOps(1)
    ops.compile()
    return ops


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> SamplingOps | CpuSamplingOps:
    return SamplingOps() if request.param == "reference" else request.getfixturevalue("compiled_ops")
