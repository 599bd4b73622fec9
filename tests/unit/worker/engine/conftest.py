"""Worker fixtures at the pipeline depths in use: 1 on the CPU, 2 on CUDA."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.worker.engine.harness import Worker
from worker.plan import StepPlan


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker: `start(depth=2, fail=...)`.

    The IPC path must be short, so pytest's own directory is not used.
    """
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="pelton-") as directory:

        def make(*, fail: Callable[[StepPlan], Exception | None] = lambda plan: None, **limits: int) -> Worker:
            workers.append(Worker(Path(directory), fail, **limits))
            return workers[-1]

        yield make
        for worker in workers:
            worker.close()


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def worker(request: pytest.FixtureRequest, start: Callable[..., Worker]) -> Worker:
    """Return a worker, once for each depth."""
    return start(depth=request.param)


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    """Return the depth for tests that start their worker themselves."""
    return int(request.param)
