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
from dataclasses import asdict, dataclass, field
from operator import truediv

import aiohttp

from scripts._bench.gateway_memory import Growth, measure_growth, measure_stores
from scripts._bench.gateway_processes import TEXT, BenchError, bare_server, client, cpu_seconds, gateway, response_ms
from scripts._bench.measurements import resident_bytes
from scripts.loadtest.report import table
from shared.arguments import Parser

_CONNECT_SECONDS = 0.05
_WARM_UP_SECONDS = 1.0
_ROUNDS = 3


@dataclass
class Figures:
    """Figures in microseconds of CPU, milliseconds and kilobytes.

    Attributes:
        cpu_us_per_token: CPU time of the gateway per token.
        bare_us_per_write: CPU time of a bare server per event.
        cpu_ratio: Cost of a token divided by that of a bare write.
        ttft_ms_p50: Time to the first token.
        idle_kilobytes: Memory of an idle stream.
        idle_streams: Number of idle streams.
        ready_ms_worst: Slowest response of /ready while the streams are idle.
        metrics_ms_worst: Slowest response of /metrics while the streams are idle.
    """

    cpu_us_per_token: dict[str, float] = field(default_factory=dict)
    bare_us_per_write: dict[str, float] = field(default_factory=dict)
    cpu_ratio: dict[str, float] = field(default_factory=dict)
    ttft_ms_p50: float = 0.0
    idle_kilobytes: float = 0.0
    idle_streams: int = 0
    ready_ms_worst: float = 0.0
    metrics_ms_worst: float = 0.0


class Stream:
    """Streamed completion whose events are counted and discarded."""

    def __init__(self, session: aiohttp.ClientSession, max_tokens: int) -> None:
        self.num_events = 0
        self.num_bytes = 0
        self.first_event: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read(session, max_tokens))

    async def _read(self, session: aiohttp.ClientSession, max_tokens: int) -> None:
        fields = {"model": "fake", "prompt": TEXT, "max_tokens": max_tokens, "stream": True}
        try:
            async with session.post("/v1/completions", json=fields) as response:
                response.raise_for_status()
                async for data in response.content.iter_any():
                    self.num_events += data.count(b"data: ")
                    self.num_bytes += len(data)
                    if not self.first_event.done():
                        self.first_event.set_result(time.perf_counter())
        except aiohttp.ClientError as error:
            if not self.first_event.done():
                self.first_event.set_exception(BenchError(f"a stream ended without an event: {error}"))

    def close(self) -> None:
        """Close the connection."""
        self._task.cancel()


async def open_streams(session: aiohttp.ClientSession, count: int, max_tokens: int) -> list[Stream]:
    """Open streams, 100 at a time so that the listen queue does not overflow."""
    streams: list[Stream] = []
    while len(streams) < count:
        streams += [Stream(session, max_tokens) for _ in range(min(100, count - len(streams)))]
        await asyncio.sleep(_CONNECT_SECONDS)
    return streams


async def cpu_per_event(session: aiohttp.ClientSession, pid: int, count: int, seconds: float) -> tuple[float, float]:
    """Return the CPU microseconds of a process per event of `count` streams, and the bytes per event."""
    streams = await open_streams(session, count, 20_000)
    await asyncio.gather(*(stream.first_event for stream in streams))
    await asyncio.sleep(_WARM_UP_SECONDS)
    begin = cpu_seconds(pid)
    events, size = sum(one.num_events for one in streams), sum(one.num_bytes for one in streams)
    await asyncio.sleep(seconds)
    used = cpu_seconds(pid) - begin
    events = sum(one.num_events for one in streams) - events
    size = sum(one.num_bytes for one in streams) - size
    for stream in streams:
        stream.close()
    if events == 0:
        raise BenchError("no event arrived while the streams were measured")
    return used / events * 1e6, size / events


async def measure_streams(figures: Figures, count: int, tick: float, seconds: float) -> None:
    """Measure a gateway and a bare server in turns, so that other load affects both of them."""
    costs, bares = [], []
    for _ in range(_ROUNDS):
        async with gateway(tick) as (session, pid):
            cost, size = await cpu_per_event(session, pid, count, seconds / _ROUNDS)
        with bare_server(round(size), tick) as (pid, port):
            async with client(port) as session:
                bare, _ = await cpu_per_event(session, pid, count, seconds / _ROUNDS)
        costs.append(cost)
        bares.append(bare)
    name = f"{count} streams"
    figures.cpu_us_per_token[name] = statistics.median(costs)
    figures.bare_us_per_write[name] = statistics.median(bares)
    figures.cpu_ratio[name] = statistics.median(map(truediv, costs, bares))


async def measure_first_token(figures: Figures, count: int) -> None:
    """Measure the time to the first token with a worker that responds at once."""
    async with gateway(0.0) as (session, _):
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            stream = Stream(session, 1)
            times.append((await stream.first_event - begin) * 1e3)
            stream.close()
    figures.ttft_ms_p50 = statistics.median(times[count // 10 :])


async def measure_idle(figures: Figures, count: int) -> None:
    """Measure memory and response times with streams that wait for a token."""
    # The tick is longer than the measurement, so that no further token arrives.
    async with gateway(120.0) as (session, pid):
        warm = await open_streams(session, 50, 1000)
        await asyncio.sleep(2 * _WARM_UP_SECONDS)
        before = resident_bytes(pid)
        streams = await open_streams(session, count, 1000)
        await asyncio.sleep(2 * _WARM_UP_SECONDS)
        figures.idle_kilobytes = (resident_bytes(pid) - before) / count / 1000
        figures.idle_streams = count
        figures.ready_ms_worst = max([await response_ms(session, "/ready") for _ in range(20)])
        figures.metrics_ms_worst = max([await response_ms(session, "/metrics") for _ in range(20)])
        for stream in (*warm, *streams):
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
    first = f"first token through the gateway: {figures.ttft_ms_p50:.2f} ms (p50)"
    idle = f"{figures.idle_streams} idle streams: {figures.idle_kilobytes:.1f} KB each"
    times = f"/ready within {figures.ready_ms_worst:.0f} ms, /metrics within {figures.metrics_ms_worst:.0f} ms"
    return f"{table(rows, ['CPU per token', 'us', 'bare write'])}\n{first}\n{idle}; meanwhile {times}"


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
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        figures: Figures | Growth
        if arguments.stored:
            figures = asyncio.run(measure_stores(arguments.stored))
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
