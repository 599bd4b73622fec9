"""What a gateway process costs: CPU per streamed token beside a bare aiohttp server's, time to the first token that it
adds, memory per idle stream and how it answers meanwhile.

The worker has no model, so that nothing but the gateway is measured. Prints a table and, as the last line, the same
figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from operator import truediv
from pathlib import Path

from scripts._bench.gateway_client import post
from scripts._bench.gateway_growth import Growth, measure_growth
from scripts._bench.gateway_processes import (
    HERE,
    BenchError,
    answer_ms,
    cpu_seconds,
    gateways,
    running,
    until_ready,
)
from scripts._bench.gateway_stores import Kept, measure_stores
from scripts._bench.process_memory import resident_bytes
from scripts.loadtest.report import table
from scripts.loadtest.server_process import free_port
from shared.arguments import Parser

_TEXT = "the quick brown fox jumps over the lazy dog "
_SETTLE_SECONDS = 1.0
_ROUNDS = 3


@dataclass
class Figures:
    """Microseconds of CPU per token, milliseconds, kilobytes.

    Attributes:
        cpu_ratio: of a token to a bare write.
        two_processes_ratio: of a token with two gateway processes to one with one.
        two_bare_ratio: the same of bare servers, each with half of the streams: what it costs by itself that two
            processes wake where one did.
    """

    cpu_us_per_token: dict[str, float] = field(default_factory=dict)
    bare_us_per_write: dict[str, float] = field(default_factory=dict)
    cpu_ratio: dict[str, float] = field(default_factory=dict)
    two_processes_ratio: dict[str, float] = field(default_factory=dict)
    two_bare_ratio: dict[str, float] = field(default_factory=dict)
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


def streamed(max_tokens: int) -> bytes:
    """A streamed completion."""
    return post("/v1/completions", model="fake", prompt=_TEXT, max_tokens=max_tokens, stream=True)


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


async def stream_cost(count: int, tick: float, num_processes: int, seconds: float) -> tuple[float, float]:
    """Microseconds of CPU per token of `count` streams, and the bytes of an event."""
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        with gateways(Path(directory), port, num_processes, tick) as pids:
            await until_ready(port)
            await asyncio.sleep(_SETTLE_SECONDS)
            streams = await open_streams(port, count, streamed(20_000))
            cost = await cpu_per_event(pids, streams, seconds)
            for stream in streams:
                stream.close()
    return cost


async def bare_cost(count: int, tick: float, size: float, num_servers: int, seconds: float) -> float:
    """The same load on so many bare servers, shared out evenly: microseconds of CPU per event."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(str(HERE / "bare_server.py"), str(round(size)), str(tick)))
            for _ in range(num_servers)
        ]
        streams: list[Streams] = []
        for server in servers:
            if server.stdout is None:
                raise BenchError("the bare server has no output")
            streams += await open_streams(int(server.stdout.readline()), count // num_servers, streamed(1))
        cost, _ = await cpu_per_event([server.pid for server in servers], streams, seconds)
        for stream in streams:
            stream.close()
    return cost


async def measure_streams(figures: Figures, count: int, tick: float, seconds: float) -> None:
    """One and two processes and bare servers in turns: what else the machine does meets all of them alike."""
    ones, bares, twos, two_bares = [], [], [], []
    seconds /= _ROUNDS
    for _ in range(_ROUNDS):
        one, size = await stream_cost(count, tick, 1, seconds)
        ones.append(one)
        bares.append(await bare_cost(count, tick, size, 1, seconds))
        twos.append((await stream_cost(count, tick, 2, seconds))[0])
        two_bares.append(await bare_cost(count, tick, size, 2, seconds))
    name = f"{count} streams"
    figures.cpu_us_per_token[f"{name}, 1 process"] = statistics.median(ones)
    figures.cpu_us_per_token[f"{name}, 2 processes"] = statistics.median(twos)
    figures.bare_us_per_write[name] = statistics.median(bares)
    figures.cpu_ratio[f"{name}, 1 process"] = statistics.median(map(truediv, ones, bares))
    figures.cpu_ratio[f"{name}, 2 processes"] = statistics.median(map(truediv, twos, bares))
    figures.two_processes_ratio[name] = statistics.median(map(truediv, twos, ones))
    figures.two_bare_ratio[name] = statistics.median(map(truediv, two_bares, bares))


async def measure_first_token(figures: Figures, count: int) -> None:
    """A worker that answers at once: what is left is the gateway, the client and three hops."""
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        with gateways(Path(directory), port, 1, 0.0):
            await until_ready(port)
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                stream = await connect(port, streamed(1))
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
            warm = await open_streams(port, 50, streamed(1000))
            await asyncio.sleep(2 * _SETTLE_SECONDS)
            before = resident_bytes(pid)
            streams = await open_streams(port, count, streamed(1000))
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
        await measure_streams(figures, count, tick, seconds)
    await measure_first_token(figures, 200)
    await measure_idle(figures, idle)
    return figures


def report(figures: Figures) -> str:
    """For people."""
    ratios = figures.cpu_ratio
    rows = [[name, f"{cost:.1f}", f"{ratios[name]:.2f}x"] for name, cost in figures.cpu_us_per_token.items()]
    rows += [[f"bare aiohttp, {name}", f"{cost:.1f}", "1x"] for name, cost in figures.bare_us_per_write.items()]
    both = [
        f"{ratio:.2f}x with {name} (bare servers {figures.two_bare_ratio[name]:.2f}x)"
        for name, ratio in figures.two_processes_ratio.items()
    ]
    two = f"a token with two processes, of one with one: {', '.join(both)}"
    first = f"first token through the gateway: {figures.ttft_ms_p50:.2f} ms (p50)"
    idle = f"{figures.idle_streams} idle streams: {figures.idle_kilobytes:.1f} KB each"
    answers = f"/ready within {figures.ready_ms_worst:.0f} ms, /metrics within {figures.metrics_ms_worst:.0f} ms"
    header = ["CPU per token", "us", "of a bare write"]
    return f"{table(rows, header)}\n{two}\n{first}\n{idle}; meanwhile {answers}"


def main() -> int:
    """The command."""
    parser = Parser(prog="scripts/bench_gateway", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of streaming for each figure (default 8)")
    parser.add_argument("--idle", type=int, default=5000, help="idle streams (default 5000)")
    parser.add_argument(
        "--requests", type=int, default=0, help="instead: memory of the process over so many requests of all kinds"
    )
    parser.add_argument(
        "--stored", type=int, default=0, help="instead: over so many stored responses, then abandoned resumable streams"
    )
    parser.add_argument("--default-bounds", action="store_true", help="of --stored: no small ones, and long responses")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        figures: Figures | Growth | Kept
        if arguments.stored:
            figures = asyncio.run(measure_stores(arguments.stored, default_bounds=arguments.default_bounds))
            print(figures.report())
        elif arguments.requests:
            figures = asyncio.run(measure_growth(arguments.requests))
            print(figures.report())
        else:
            figures = asyncio.run(measure(arguments.seconds, arguments.idle))
            print(report(figures))
    except BenchError as error:
        print(f"bench_gateway: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
