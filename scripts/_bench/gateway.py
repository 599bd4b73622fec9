"""What a gateway process costs: CPU per streamed token beside a bare aiohttp server's, time to the first token that it
adds, memory per idle stream and how it answers meanwhile.

The worker has no model, so that nothing but the gateway is measured. Prints a table and, as the last line, the same
figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.loadtest.report import table
from scripts.loadtest.server_process import free_port

_ROOT = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).resolve().parent
_TEXT = "the quick brown fox jumps over the lazy dog "
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SETTLE_SECONDS = 1.0


class BenchError(Exception):
    """A process did not do what is to be measured."""


@dataclass
class Figures:
    """Microseconds of CPU per token, milliseconds, kilobytes."""

    cpu_us_per_token: dict[str, float] = field(default_factory=dict)
    bare_us_per_write: dict[str, float] = field(default_factory=dict)
    cpu_ratio: dict[str, float] = field(default_factory=dict)
    ttft_ms_p50: float = 0.0
    idle_kilobytes: float = 0.0
    idle_streams: int = 0
    ready_ms_worst: float = 0.0
    metrics_ms_worst: float = 0.0


class Streams(asyncio.Protocol):
    """One connection that counts events and throws them away."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.BaseTransport | None = None
        self.num_events = 0
        self.num_bytes = 0
        self.refusal = b""
        self.first_event: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        self._transport = transport
        if isinstance(transport, asyncio.WriteTransport):
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts."""
        if not self.num_bytes and not data.startswith(b"HTTP/1.1 200"):
            self.refusal = data
        self.num_events += data.count(b"data: ")
        self.num_bytes += len(data)
        if self.num_events and not self.first_event.done():
            self.first_event.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for an event shall not wait on."""
        if not self.first_event.done():
            self.first_event.set_exception(BenchError(f"a stream ended without an event: {self.refusal!r}"))

    def close(self) -> None:
        """Leaves."""
        if self._transport is not None:
            self._transport.close()


def post(max_tokens: int) -> bytes:
    """A streamed completion."""
    body = json.dumps({"model": "fake", "prompt": _TEXT, "max_tokens": max_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


async def connect(port: int, request: bytes) -> Streams:
    """Opens a connection and sends the request."""
    _, protocol = await asyncio.get_running_loop().create_connection(lambda: Streams(request), "127.0.0.1", port)
    return protocol


async def open_streams(port: int, count: int, request: bytes) -> list[Streams]:
    """Some at a time, so that no queue of connections overflows."""
    streams: list[Streams] = []
    while len(streams) < count:
        group = min(100, count - len(streams))
        streams += await asyncio.gather(*(connect(port, request) for _ in range(group)))
    return streams


async def cpu_per_event(pids: Sequence[int], streams: list[Streams], seconds: float) -> tuple[float, float]:
    """Microseconds of CPU of the processes per event over some seconds of streaming, and bytes per event."""
    await asyncio.gather(*(stream.first_event for stream in streams))
    await asyncio.sleep(_SETTLE_SECONDS)
    begin = sum(cpu_seconds(pid) for pid in pids)
    events, size = sum(one.num_events for one in streams), sum(one.num_bytes for one in streams)
    await asyncio.sleep(seconds)
    used = sum(cpu_seconds(pid) for pid in pids) - begin
    events = sum(one.num_events for one in streams) - events
    size = sum(one.num_bytes for one in streams) - size
    if events == 0:
        raise BenchError("no event came while the streams were measured")
    return used / events * 1e6, size / events


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(*command: str, quiet: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A Python process of the benchmark's own; ended with the block."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    log = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        [sys.executable, "-P", *command], stdout=subprocess.PIPE, stderr=log, env=environment, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def gateways(directory: Path, port: int, num_processes: int, tick: float) -> Iterator[list[int]]:
    """Gateway processes with one worker; their ids."""
    flags = ["--runtime-dir", str(directory), "--port", str(port), "--log-level", "warning"]
    flags += ["--max-concurrent-requests", "20000", "--max-waiting-requests", "20000"]
    with running(str(_HERE / "gateway_worker.py"), str(directory), str(tick)):
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


async def measure_streams(figures: Figures, count: int, tick: float, num_processes: int, seconds: float) -> float:
    """CPU per token of `count` streams; returns the bytes of an event."""
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        with gateways(Path(directory), port, num_processes, tick) as pids:
            await until_ready(port)
            await asyncio.sleep(_SETTLE_SECONDS)
            streams = await open_streams(port, count, post(20_000))
            cost, size = await cpu_per_event(pids, streams, seconds)
            for stream in streams:
                stream.close()
    figures.cpu_us_per_token[f"{count} streams, {num_processes} process{'es' * (num_processes > 1)}"] = cost
    return size


async def measure_bare(figures: Figures, count: int, tick: float, size: float, seconds: float) -> None:
    """The same load on the bare server."""
    with running(str(_HERE / "bare_server.py"), str(round(size)), str(tick)) as server:
        if server.stdout is None:
            raise BenchError("the bare server has no output")
        port = int(server.stdout.readline())
        streams = await open_streams(port, count, post(1))
        cost, _ = await cpu_per_event([server.pid], streams, seconds)
        for stream in streams:
            stream.close()
    figures.bare_us_per_write[f"{count} streams"] = cost


async def measure_first_token(figures: Figures, count: int) -> None:
    """A worker that answers at once: what is left is the gateway, the client and three hops."""
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        with gateways(Path(directory), port, 1, 0.0):
            await until_ready(port)
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                stream = await connect(port, post(1))
                times.append((await stream.first_event - begin) * 1e3)
                stream.close()
    figures.ttft_ms_p50 = statistics.median(times[count // 10 :])


async def measure_idle(figures: Figures, count: int) -> None:
    """Streams that have had one token and wait; memory of each, and how the gateway answers meanwhile."""
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        # A tick so long that no second token comes while they are measured.
        with gateways(Path(directory), port, 1, 120.0) as (pid,):
            await until_ready(port)
            warm = await open_streams(port, 50, post(1000))
            await asyncio.sleep(2 * _SETTLE_SECONDS)
            before = resident_bytes(pid)
            streams = await open_streams(port, count, post(1000))
            await asyncio.sleep(2 * _SETTLE_SECONDS)
            figures.idle_kilobytes = (resident_bytes(pid) - before) / count / 1000
            figures.idle_streams = count
            figures.ready_ms_worst = max([await answer_ms(port, "/ready") for _ in range(20)])
            figures.metrics_ms_worst = max([await answer_ms(port, "/metrics") for _ in range(20)])
            for stream in (*warm, *streams):
                stream.first_event.cancel()
                stream.close()


async def measure(seconds: float, idle: int) -> Figures:
    """All of it."""
    figures = Figures()
    for count, tick in ((64, 0.02), (512, 0.1)):
        size = await measure_streams(figures, count, tick, 1, seconds)
        await measure_bare(figures, count, tick, size, seconds)
        await measure_streams(figures, count, tick, 2, seconds)
        bare = figures.bare_us_per_write[f"{count} streams"]
        for name, cost in figures.cpu_us_per_token.items():
            if name.startswith(f"{count} "):
                figures.cpu_ratio[name] = cost / bare
    await measure_first_token(figures, 200)
    await measure_idle(figures, idle)
    return figures


def report(figures: Figures) -> str:
    """For people."""
    ratios = figures.cpu_ratio
    rows = [[name, f"{cost:.1f}", f"{ratios[name]:.2f}x"] for name, cost in figures.cpu_us_per_token.items()]
    rows += [[f"bare aiohttp, {name}", f"{cost:.1f}", "1x"] for name, cost in figures.bare_us_per_write.items()]
    first = f"first token through the gateway: {figures.ttft_ms_p50:.2f} ms (p50)"
    idle = f"{figures.idle_streams} idle streams: {figures.idle_kilobytes:.1f} KB each"
    answers = f"/ready within {figures.ready_ms_worst:.0f} ms, /metrics within {figures.metrics_ms_worst:.0f} ms"
    header = ["CPU per token", "us", "of a bare write"]
    return f"{table(rows, header)}\n{first}\n{idle}; meanwhile {answers}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/bench_gateway", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of streaming for each figure (default 8)")
    parser.add_argument("--idle", type=int, default=5000, help="idle streams (default 5000)")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        figures = asyncio.run(measure(arguments.seconds, arguments.idle))
    except BenchError as error:
        print(f"bench_gateway: {error}", file=sys.stderr)
        return 1
    print(report(figures))
    print(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
