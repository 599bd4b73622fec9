"""The processes of the gateway's benchmarks: gateways over a worker without a model, what they use, how they answer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


class BenchError(Exception):
    """A process did not do what is to be measured."""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process's threads. By the scheduler's nanoseconds: a clock tick is 10 ms, some percent
    of what is measured.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def running(*command: str, quiet: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A Python process of the benchmark's own; ended with the block."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    log = subprocess.DEVNULL if quiet else None
    everything = [sys.executable, "-P", *command]
    with subprocess.Popen(everything, stdout=subprocess.PIPE, stderr=log, env=environment, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def gateways(directory: Path, port: int, num_processes: int, tick: float, *more: str) -> Iterator[list[int]]:
    """Gateway processes with one worker and `more` flags; their ids."""
    flags = ["--runtime-dir", str(directory), "--port", str(port), "--log-level", "warning"]
    flags += ["--max-concurrent-requests", "20000", "--max-waiting-requests", "20000", *more]
    with running(str(HERE / "gateway_worker.py"), str(directory), str(tick)):
        if num_processes == 1:
            with running("-m", "gateway", *flags) as only:
                yield [only.pid]
            return
        both = ("--gateway-processes", "2", "--gateway-index")
        with running("-m", "gateway", *flags, *both, "0") as one, running("-m", "gateway", *flags, *both, "1") as other:
            yield [one.pid, other.pid]


async def answer_ms(port: int, path: str) -> float:
    """Milliseconds until a GET is answered with 200."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"{path}: {answer[:200]!r}")
    return (time.perf_counter() - begin) * 1e3


async def until_ready(port: int) -> None:
    """Waits for a gateway that knows its worker."""
    deadline = time.monotonic() + 30
    while True:
        try:
            await answer_ms(port, "/ready")
            return
        except (OSError, BenchError):
            if time.monotonic() > deadline:
                raise BenchError("the gateway was not ready within 30 s") from None
            await asyncio.sleep(0.05)
