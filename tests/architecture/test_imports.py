"""Each process loads only its own side. The contracts in pyproject.toml (import-linter) check the static imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import ROOT


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("gateway.__main__", {"torch", "transformers", "worker", "kernels", "multiprocessing.pool"}),
        ("worker.__main__", {"aiohttp", "gateway", "transformers"}),
        ("worker.scheduler.scheduler", {"torch", "numba", "llguidance", "tokenizers", "zmq"}),
        ("shared.supervisor", {"aiohttp", "torch", "transformers", "numpy", "gateway", "worker", "kernels"}),
        ("shared.cli", {"aiohttp", "torch", "zmq", "msgspec", "structlog"}),
    ],
)
def test_a_process_loads_only_its_own_side(module, forbidden):
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({sorted(forbidden)!r})))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
