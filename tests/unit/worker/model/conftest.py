"""Cache of compiled test kernels, keyed by the hash of all sources, and the opened default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.common.cpu.pool import use_cache_directory
from worker.model.loading import ModelFiles, open_model


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache() -> None:
    use_cache_directory(Path(__file__).parents[4] / ".pytest_cache" / "numba")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    opened = open_model("", tmp_path_factory.mktemp("cache"))
    yield opened
    opened.weights.close()
