"""The registry of workers."""

from __future__ import annotations

from pathlib import Path

from gateway.cluster.registry import Registry
from gateway.text.pipeline import TextThreads
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import until


async def test_a_model_that_was_loaded_is_told_of_once_before_its_workers_join(tmp_path: Path):
    threads, loaded = TextThreads(), []
    registry = Registry(
        directory=tmp_path,
        gateway_id="gw",
        threads=threads,
        scan_interval=0.02,
        on_loaded=lambda: loaded.append(len(registry.models())),
    )
    with FakeWorker(tmp_path), FakeWorker(tmp_path, index=1):
        await registry.start()
        try:
            await until(lambda: sum(len(entry.workers) for entry in registry.models()) == 2)
        finally:
            await registry.close()
            threads.close()
    assert loaded == [0]
