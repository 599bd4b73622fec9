"""The registry of workers and the discovery of their sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from gateway.cluster.registry import Registry, WorkerDirectory
from gateway.text.pipeline import TextThreads
from shared import sockets
from tests.fakes.fake_worker import FakeWorker


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
            for _ in range(3000):
                if sum(len(entry.workers) for entry in registry.models()) == 2:
                    break
                await asyncio.sleep(0.01)
        finally:
            await registry.close()
            threads.close()
    assert loaded == [0]


SECOND = 1_000_000_000


def _bind(directory: Path, index: int) -> str:
    endpoint = sockets.worker_endpoint(directory, index, "00000001")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(endpoint.removeprefix("ipc://"))
    return endpoint


def _age(directory: Path, seconds: float) -> None:
    """Set the time of the last change to this many seconds ago."""
    changed = time.time_ns() - int(seconds * SECOND)
    os.utime(directory, ns=(changed, changed))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """List with one entry per reading of a directory."""
    read: list[Path] = []
    original = sockets.list_worker_endpoints

    def counted(directory: Path) -> list[str]:
        read.append(directory)
        return original(directory)

    monkeypatch.setattr(sockets, "list_worker_endpoints", counted)
    return read


def test_what_comes_and_goes_is_seen(tmp_path: Path) -> None:
    directory = WorkerDirectory(tmp_path)
    assert list(directory.endpoints()) == []
    first = _bind(tmp_path, 0)
    assert list(directory.endpoints()) == [first]
    _age(tmp_path, 10)
    assert list(directory.endpoints()) == [first]
    second = _bind(tmp_path, 1)
    assert sorted(directory.endpoints()) == [first, second]
    Path(first.removeprefix("ipc://")).unlink()
    assert list(directory.endpoints()) == [second]


def test_a_quiet_directory_is_read_once(tmp_path: Path, readings: list[Path]) -> None:
    endpoint = _bind(tmp_path, 0)
    _age(tmp_path, 10)
    directory = WorkerDirectory(tmp_path)
    assert [list(directory.endpoints()) for _ in range(3)] == [[endpoint]] * 3
    assert len(readings) == 1


def test_what_comes_within_the_resolution_of_time_is_seen(tmp_path: Path) -> None:
    directory = WorkerDirectory(tmp_path)
    changed = time.time_ns()
    os.utime(tmp_path, ns=(changed, changed))
    assert list(directory.endpoints()) == []
    endpoint = _bind(tmp_path, 0)
    os.utime(tmp_path, ns=(changed, changed))
    assert list(directory.endpoints()) == [endpoint]


def test_a_directory_that_is_missing_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "later"
    directory = WorkerDirectory(path)
    assert list(directory.endpoints()) == []
    path.mkdir()
    endpoint = _bind(path, 0)
    _age(path, 10)
    assert list(directory.endpoints()) == [endpoint]
    Path(endpoint.removeprefix("ipc://")).unlink()
    path.rmdir()
    assert list(directory.endpoints()) == []
