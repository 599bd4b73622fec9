"""Processes and HTTP client of the gateway benchmarks: gateways in front of a worker without a model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from scripts.loadtest.server_process import free_port

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = str(Path(__file__).with_name("gateway_peers.py"))
_LAST_CHUNK = b"\r\n0\r\n\r\n"
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
async def gateways(num_processes: int, tick: float, *flags: str) -> AsyncIterator[tuple[int, list[int]]]:
    """Run gateway processes with one worker; yield their port and process ids once they are ready."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp"))
        port = free_port()
        arguments = ["--runtime-dir", directory, "--port", str(port), "--log-level", "warning", *flags]
        arguments += ["--max-concurrent-requests", "20000", "--max-waiting-requests", "20000"]
        stack.enter_context(running(_PEERS, "worker", directory, str(tick)))
        pids = []
        for index in range(num_processes):
            of_many = ("--gateway-processes", str(num_processes), "--gateway-index", str(index))
            chosen = of_many if num_processes > 1 else ()
            pids.append(stack.enter_context(running("-m", "gateway", *arguments, *chosen)).pid)
        await _wait_until_ready(port)
        yield port, pids


async def response_ms(port: int, path: str) -> float:
    """Return the milliseconds until a GET request is answered with 200."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get(path, Connection="close"))
    response = await reader.read()
    writer.close()
    if not response.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"{path}: {response[:200]!r}")
    return (time.perf_counter() - begin) * 1e3


async def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            await response_ms(port, "/ready")
            return
        except (OSError, BenchError):
            if time.monotonic() > deadline:
                raise BenchError("the gateway was not ready within 30 s") from None
            await asyncio.sleep(0.05)


def post(path: str, **fields: object) -> bytes:
    """Return the bytes of a request with a JSON body."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str, method: str = "GET", **headers: str) -> bytes:
    """Return the bytes of a request without a body."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode()


class Client:
    """HTTP client with one persistent connection that parses as little as possible."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def begin(self, data: bytes, *statuses: int) -> tuple[asyncio.StreamReader, bytes]:
        """Send a request and return the reader of the body and the head of the response.

        Raises:
            BenchError: The status is not one of the given ones.
        """
        if self._connection is None:
            self._connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._connection
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if int(head[9:12]) not in statuses:
            raise BenchError(f"expected one of the statuses {statuses}: {head[:200]!r}")
        return reader, head

    async def ask(self, data: bytes, status: int = 200) -> bytes:
        """Send a request and return the body; a chunked body keeps its chunk headers.

        Raises:
            BenchError: The response has another status.
        """
        reader, head = await self.begin(data, status)
        if b"Transfer-Encoding: chunked" in head:
            return await reader.readuntil(_LAST_CHUNK)
        length = head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
        return await reader.readexactly(int(length or b"0"))

    def abort(self) -> None:
        """Abort the connection, even during a response; the next request opens a new one."""
        if self._connection is not None:
            self._connection[1].transport.abort()
            self._connection = None
