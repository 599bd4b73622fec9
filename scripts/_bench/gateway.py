"""Cost of a gateway process, measured with a worker that has no model.

The figures are CPU time per streamed token beside that of a bare aiohttp server, the time that the gateway adds to the
first token, the memory of an idle stream, and the response time while many streams are idle. Prints a table and, as the
last line, the same figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from operator import truediv

from scripts._bench.gateway_memory import Growth, measure_growth, measure_stores
from scripts._bench.gateway_processes import TEXT, BenchError, bare_server, cpu_seconds, gateways, post, response_ms
from scripts._bench.measurements import resident_bytes
from scripts.loadtest.report import table
from shared.arguments import Parser

_WARM_UP_SECONDS = 1.0
_ROUNDS = 3


@dataclass
class Figures:
    """Figures in microseconds of CPU, milliseconds and kilobytes.

    Attributes:
        cpu_us_per_token: CPU time of the gateway per token.
        bare_us_per_write: CPU time of a bare server per event.
        cpu_ratio: Cost of a token divided by that of a bare write.
        two_processes_ratio: Cost of a token with two gateway processes divided by the cost with one.
        two_bare_ratio: The same for bare servers with half of the streams each: the cost of waking two processes.
        ttft_ms_p50: Time to the first token.
        idle_kilobytes: Memory of an idle stream.
        idle_streams: Number of idle streams.
        ready_ms_worst: Slowest response of /ready while the streams are idle.
        metrics_ms_worst: Slowest response of /metrics while the streams are idle.
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


class StreamClient(asyncio.Protocol):
    """Connection that counts the events of one stream and discards them."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.WriteTransport | None = None
        self.num_events = 0
        self.num_bytes = 0
        self.refusal = b""
        self.first_event: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count events and bytes."""
        if not self.num_bytes and not data.startswith(b"HTTP/1.1 200"):
            self.refusal = data
        self.num_events += data.count(b"data: ")
        self.num_bytes += len(data)
        if self.num_events and not self.first_event.done():
            self.first_event.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail a pending wait for the first event."""
        if not self.first_event.done():
            self.first_event.set_exception(BenchError(f"a stream ended without an event: {self.refusal!r}"))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def streamed(max_tokens: int) -> bytes:
    """Return the bytes of a streamed completion request."""
    return post("/v1/completions", model="fake", prompt=TEXT, max_tokens=max_tokens, stream=True)


async def open_streams(port: int, count: int, request: bytes) -> list[StreamClient]:
    """Open connections and send the request on each, 100 at a time so that the listen queue does not overflow."""
    loop = asyncio.get_running_loop()
    streams: list[StreamClient] = []
    while len(streams) < count:
        size = min(100, count - len(streams))
        opened = await asyncio.gather(
            *(loop.create_connection(lambda: StreamClient(request), "127.0.0.1", port) for _ in range(size))
        )
        streams += [stream for _, stream in opened]
    return streams


async def cpu_per_event(pids: Sequence[int], streams: list[StreamClient], seconds: float) -> tuple[float, float]:
    """Return the CPU microseconds of the processes per event and the bytes per event; close the streams."""
    await asyncio.gather(*(stream.first_event for stream in streams))
    await asyncio.sleep(_WARM_UP_SECONDS)
    begin = sum(cpu_seconds(pid) for pid in pids)
    events, size = sum(one.num_events for one in streams), sum(one.num_bytes for one in streams)
    await asyncio.sleep(seconds)
    used = sum(cpu_seconds(pid) for pid in pids) - begin
    events = sum(one.num_events for one in streams) - events
    size = sum(one.num_bytes for one in streams) - size
    for stream in streams:
        stream.close()
    if events == 0:
        raise BenchError("no event arrived while the streams were measured")
    return used / events * 1e6, size / events


async def stream_cost(count: int, tick: float, num_processes: int, seconds: float) -> tuple[float, float]:
    """Return the CPU microseconds of gateways per token of `count` streams, and the bytes of an event."""
    async with gateways(num_processes, tick) as (port, pids):
        await asyncio.sleep(_WARM_UP_SECONDS)
        return await cpu_per_event(pids, await open_streams(port, count, streamed(20_000)), seconds)


async def bare_cost(count: int, tick: float, size: float, num_servers: int, seconds: float) -> float:
    """Return the CPU microseconds per event of bare servers that share the same load evenly."""
    with ExitStack() as stack:
        servers = [stack.enter_context(bare_server(round(size), tick)) for _ in range(num_servers)]
        streams: list[StreamClient] = []
        for _, port in servers:
            streams += await open_streams(port, count // num_servers, streamed(1))
        cost, _ = await cpu_per_event([pid for pid, _ in servers], streams, seconds)
    return cost


async def measure_streams(figures: Figures, count: int, tick: float, seconds: float) -> None:
    """Measure one and two processes and bare servers in turns, so that other load affects all of them."""
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
    """Measure the time to the first token with a worker that responds at once."""
    async with gateways(1, 0.0) as (port, _):
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            (stream,) = await open_streams(port, 1, streamed(1))
            times.append((await stream.first_event - begin) * 1e3)
            stream.close()
    figures.ttft_ms_p50 = statistics.median(times[count // 10 :])


async def measure_idle(figures: Figures, count: int) -> None:
    """Measure memory and response times with streams that have received one token and wait for the next."""
    # The tick is longer than the measurement, so that no second token arrives.
    async with gateways(1, 120.0) as (port, (pid,)):
        warm = await open_streams(port, 50, streamed(1000))
        await asyncio.sleep(2 * _WARM_UP_SECONDS)
        before = resident_bytes(pid)
        streams = await open_streams(port, count, streamed(1000))
        await asyncio.sleep(2 * _WARM_UP_SECONDS)
        figures.idle_kilobytes = (resident_bytes(pid) - before) / count / 1000
        figures.idle_streams = count
        figures.ready_ms_worst = max([await response_ms(port, "/ready") for _ in range(20)])
        figures.metrics_ms_worst = max([await response_ms(port, "/metrics") for _ in range(20)])
        for stream in (*warm, *streams):
            stream.first_event.cancel()
            stream.close()


async def measure(seconds: float, idle: int) -> Figures:
    """Measure all figures."""
    figures = Figures()
    for count, tick in ((64, 0.02), (512, 0.1)):
        await measure_streams(figures, count, tick, seconds)
    await measure_first_token(figures, 200)
    await measure_idle(figures, idle)
    return figures


def report(figures: Figures) -> str:
    """Return the table."""
    ratios = figures.cpu_ratio
    rows = [[name, f"{cost:.1f}", f"{ratios[name]:.2f}x"] for name, cost in figures.cpu_us_per_token.items()]
    rows += [[f"bare aiohttp, {name}", f"{cost:.1f}", "1x"] for name, cost in figures.bare_us_per_write.items()]
    both = [
        f"{ratio:.2f}x with {name} (bare servers {figures.two_bare_ratio[name]:.2f}x)"
        for name, ratio in figures.two_processes_ratio.items()
    ]
    two = f"CPU per token, two processes / one: {', '.join(both)}"
    first = f"first token through the gateway: {figures.ttft_ms_p50:.2f} ms (p50)"
    idle = f"{figures.idle_streams} idle streams: {figures.idle_kilobytes:.1f} KB each"
    times = f"/ready within {figures.ready_ms_worst:.0f} ms, /metrics within {figures.metrics_ms_worst:.0f} ms"
    return f"{table(rows, ['CPU per token', 'us', 'bare write'])}\n{two}\n{first}\n{idle}; meanwhile {times}"


def main() -> int:
    """Run scripts/bench_gateway."""
    parser = Parser(prog="scripts/bench_gateway", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="streaming time per figure (default 8)")
    parser.add_argument("--idle", type=int, default=5000, help="number of idle streams (default 5000)")
    parser.add_argument(
        "--requests", type=int, default=0, help="measure only the memory over this many requests of all kinds"
    )
    parser.add_argument(
        "--stored",
        type=int,
        default=0,
        help="measure only the memory over this many stored responses and abandoned resumable streams",
    )
    parser.add_argument(
        "--default-bounds", action="store_true", help="with --stored: default store sizes and longer responses"
    )
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        figures: Figures | Growth
        if arguments.stored:
            figures = asyncio.run(measure_stores(arguments.stored, default_bounds=arguments.default_bounds))
        elif arguments.requests:
            figures = asyncio.run(measure_growth(arguments.requests))
        else:
            figures = asyncio.run(measure(arguments.seconds, arguments.idle))
    except BenchError as error:
        print(f"bench_gateway: {error}", file=sys.stderr)
        return 1
    print(report(figures) if isinstance(figures, Figures) else figures.report())
    print(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
