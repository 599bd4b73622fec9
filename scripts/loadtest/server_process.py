"""Process of `pelton serve` on a free loopback port, for benchmarks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

_ROOT = Path(__file__).resolve().parents[2]
_READY_SECONDS = 180.0
_STOP_SECONDS = 40.0


class ServerError(Exception):
    """Failure of the server to become ready."""


@dataclass(frozen=True)
class Server:
    """Running server; `ready_seconds` is the time to the first 200 of /ready, `pid` the supervisor's."""

    url: str
    ready_seconds: float
    pid: int


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@asynccontextmanager
async def serve(cache_dir: Path, log: Path, arguments: Sequence[str]) -> AsyncIterator[Server]:
    """Run a server until the end of the block, then stop it with SIGTERM, and after a time limit with SIGKILL.

    Raises:
        ServerError: The server exits or is not ready in time; the message ends with the last lines of the log.
    """
    port = free_port()
    # The directory is short, because the length of socket paths is limited.
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as runtime_dir:
        command = [sys.executable, "-P", "-m", "shared.cli", "serve", "--host", "127.0.0.1", "--port", str(port),
                   "--runtime-dir", runtime_dir, "--cache-dir", str(cache_dir), *arguments]  # fmt: skip
        start = time.monotonic()
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "XDG_CACHE_HOME": str(cache_dir)},
            )  # fmt: skip
        try:
            await _wait_ready(process, port, log)
            yield Server(f"http://127.0.0.1:{port}/v1", time.monotonic() - start, process.pid)
        finally:
            await _stop(process)


async def _wait_ready(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise ServerError(f"the server exited with {process.returncode}:\n{_tail(log)}")
            try:
                async with session.get(f"http://127.0.0.1:{port}/ready") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.02)
    raise ServerError(f"the server was not ready within {_READY_SECONDS:.0f} s:\n{_tail(log)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
