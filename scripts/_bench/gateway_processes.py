"""Processes and HTTP client of the gateway benchmarks: a gateway in front of a worker without a model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from scripts.loadtest.server_process import free_port

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = str(Path(__file__).with_name("gateway_peers.py"))
TEXT = "the quick brown fox jumps over the lazy dog "


class BenchError(Exception):
    """Unexpected response or state of a process under measurement."""


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process.

    The scheduler's nanoseconds are used, because a clock tick of 10 ms is several percent of the measured time.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process and kill it at the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(
        [sys.executable, "-P", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def bare_server(chunk_bytes: int, tick: float) -> Iterator[tuple[int, int]]:
    """Run an aiohttp server that only writes events; yield its process id and port."""
    with running(_PEERS, "server", str(chunk_bytes), str(tick)) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())


@asynccontextmanager
async def gateway(tick: float, *flags: str) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    """Run a gateway with one worker; yield a client and the process id of the gateway once it is ready."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp"))
        port = free_port()
        arguments = ["--runtime-dir", directory, "--port", str(port), "--log-level", "warning", *flags]
        arguments += ["--max-concurrent-requests", "20000", "--max-waiting-requests", "20000"]
        stack.enter_context(running(_PEERS, "worker", directory, str(tick)))
        pid = stack.enter_context(running("-m", "gateway", *arguments)).pid
        async with client(port) as session:
            await _wait_until_ready(session)
            yield session, pid


async def response_ms(session: aiohttp.ClientSession, path: str) -> float:
    """Return the milliseconds until a GET request is answered with 200."""
    begin = time.perf_counter()
    async with session.get(path, headers={"Connection": "close"}) as response:
        body = await response.read()
    if response.status != 200:
        raise BenchError(f"{path}: status {response.status}: {body[:200]!r}")
    return (time.perf_counter() - begin) * 1e3


async def _wait_until_ready(session: aiohttp.ClientSession) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            await response_ms(session, "/ready")
            return
        except (OSError, aiohttp.ClientError, BenchError):
            if time.monotonic() > deadline:
                raise BenchError("the gateway was not ready within 30 s") from None
            await asyncio.sleep(0.05)


def client(port: int) -> aiohttp.ClientSession:
    """Return an HTTP client of a local server without a limit of connections."""
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0))
