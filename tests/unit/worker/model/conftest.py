"""Compiled kernels of tests are kept where numba would keep them, but by the hash of all sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.common.cpu.pool import use_cache_directory


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache() -> None:
    use_cache_directory(Path(__file__).parents[4] / ".pytest_cache" / "numba")
