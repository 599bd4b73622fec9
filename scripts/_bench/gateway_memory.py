"""Memory of a gateway process over many requests.

Series "requests" has requests of all kinds: whole and streamed, chat and completions, invalid ones, and ones whose
client disconnects. Series "responses" and "streams" fill the stores of responses and of resumable streams. With small
bounds the stores are full early, and memory must not grow from then on.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial

import orjson

from scripts._bench.gateway_processes import TEXT, Client, gateways, get, post
from scripts._bench.measurements import open_files, resident_bytes

_CLIENTS = 32
_NUM_SAMPLES = 10
_SMALL_BOUNDS = ("--response-store-size", str(32 << 20), "--stream-buffer-size", str(1 << 20), "--stream-grace", "1")
_EXPIRY_SECONDS = 2.0
"""Wait before a sample: twice the grace period of streams in _SMALL_BOUNDS."""
_TICK = 0.01
_WARM_SHARE = 0.4
_MAX_GROWTH = 1.03
_UNFINISHED = 10_000
"""Tokens of a stream that does not end during the benchmark."""
_STREAM_ID = re.compile(rb'"id":"(chatcmpl-[0-9a-f]+)"')

Sender = Callable[[Client, Iterator[int]], Coroutine[None, None, None]]
"""Sends one request for each number of an iterator that all clients share."""


@dataclass
class Sample:
    """State of the gateway process after a number of requests."""

    requests: int
    kilobytes: float
    open_files: int


@dataclass
class Growth:
    """Samples of each series, and True for series without growth after 40 % of the requests (at most 3 %)."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    flat: dict[str, bool] = field(default_factory=dict)

    def judge(self) -> None:
        """Set `flat` from the samples."""
        self.flat = {name: _ratio(samples) < _MAX_GROWTH for name, samples in self.samples.items()}

    def report(self) -> str:
        """Return the lines of the table."""
        lines = []
        for name, samples in self.samples.items():
            lines += [
                f"{name}: after {one.requests:,}: {one.kilobytes:,.0f} KB, {one.open_files} files" for one in samples
            ]
            verdict = "flat" if self.flat[name] else "growing"
            lines.append(f"{name}: memory at the end / at 40 %: {_ratio(samples):.3f} ({verdict})")
        return "\n".join(lines)


def _ratio(samples: list[Sample]) -> float:
    warm = next(one for one in samples if one.requests >= _WARM_SHARE * samples[-1].requests)
    return samples[-1].kilobytes / warm.kilobytes


async def measure_growth(num_requests: int) -> Growth:
    """Measure series "requests". Raises BenchError for an unexpected response."""
    growth = Growth()
    async with gateways(1, 0.0) as (port, (pid,)):
        growth.samples["requests"] = await _sample(port, pid, num_requests, _send_all_kinds)
    growth.judge()
    return growth


async def measure_stores(num_requests: int, *, default_bounds: bool = False) -> Growth:
    """Measure series "responses" and "streams". Raises BenchError for an unexpected response.

    Args:
        num_requests: Number of responses, and of streams.
        default_bounds: Keep the default bounds; responses and streams are then longer, so that the bounds are reached.
    """
    growth = Growth()
    flags, text, length = ((), TEXT * 400, 100) if default_bounds else (_SMALL_BOUNDS, TEXT, 1)
    async with gateways(1, _TICK, *flags) as (port, (pid,)):
        growth.samples["responses"] = await _sample(port, pid, num_requests, partial(_respond, text))
        growth.samples["streams"] = await _sample(port, pid, num_requests, partial(_abandon, length))
    growth.judge()
    return growth


async def _sample(port: int, pid: int, num_requests: int, send: Sender) -> list[Sample]:
    """Send requests over concurrent connections, and sample the process after each tenth of them."""
    numbers = iter(range(num_requests))
    samples: list[Sample] = []
    for index in range(1, _NUM_SAMPLES + 1):
        count = num_requests * index // _NUM_SAMPLES
        part = itertools.islice(numbers, count - (samples[-1].requests if samples else 0))
        clients = [Client(port) for _ in range(_CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(send(client, part))
        for client in clients:
            client.abort()
        await asyncio.sleep(_EXPIRY_SECONDS)
        samples.append(Sample(count, resident_bytes(pid) / 1000, open_files(pid)))
        print(f"{count:,}: {samples[-1].kilobytes:,.0f} KB", file=sys.stderr, flush=True)
    return samples


async def _send_all_kinds(client: Client, numbers: Iterator[int]) -> None:
    completion = {"model": "fake", "prompt": TEXT, "max_tokens": 4}
    chat = {"model": "fake", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "n": 2}
    for number in numbers:
        match number % 6:
            case 0:
                await client.ask(post("/v1/completions", **completion, stream=True))
            case 1:
                await client.ask(post("/v1/completions", **completion, logprobs=2))
            case 2:
                await client.ask(post("/v1/chat/completions", **chat, stream=True))
            case 3:
                await client.ask(post("/v1/chat/completions", **chat, stop=["no such text"]))
            case 4:
                await client.ask(post("/v1/completions", **completion, best_off=2), 400)
            case 5:
                await client.begin(post("/v1/completions", **{**completion, "max_tokens": 64}, stream=True), 200)
                client.abort()


async def _respond(text: str, client: Client, numbers: Iterator[int]) -> None:
    """Hold conversations of a few turns: stored, streamed, in the background, not stored, deleted, and abandoned."""
    previous: str | None = None
    for turn, number in enumerate(numbers):
        fields: dict[str, object] = {"model": "fake", "input": text * (1 + number % 5), "max_output_tokens": 3}
        match turn % 8:
            case 0 | 1 | 2:
                if previous is not None:
                    fields["previous_response_id"] = previous
                previous = await _create(client, fields)
            case 3:
                await client.ask(post("/v1/responses", **fields, stream=True))
            case 4:
                path = f"/v1/responses/{await _create(client, {**fields, 'background': True})}"
                while orjson.loads(await client.ask(get(path)))["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
                    await asyncio.sleep(_TICK)
            case 5:
                await client.ask(post("/v1/responses", **fields, store=False))
            case 6:
                if previous is not None:
                    await client.ask(get(f"/v1/responses/{previous}", "DELETE"))
                previous = None
                await _create(client, fields)
            case 7:
                body, _ = await client.begin(post("/v1/responses", **fields, stream=True, background=True), 200)
                await body.readuntil(b"\n\n")
                client.abort()


async def _create(client: Client, fields: dict[str, object]) -> str:
    return str(orjson.loads(await client.ask(post("/v1/responses", **fields)))["id"])


async def _abandon(length: int, client: Client, numbers: Iterator[int]) -> None:
    """Disconnect from resumable streams after 0 to 5 events.

    One stream in eight does not end. One in four is resumed once and abandoned again.
    """
    for number in numbers:
        fields = {
            "model": "fake",
            "messages": [{"role": "user", "content": TEXT * (1 + number % 5)}],
            "max_tokens": _UNFINISHED if number % 8 == 0 else length * (1 + number % 7),
            "stream": True,
            "stream_options": {"resumable": True},
        }
        body, _ = await client.begin(post("/v1/chat/completions", **fields), 200)
        events = await _read_events(body, number % 6)
        client.abort()
        found = _STREAM_ID.search(events)
        if found is not None and number % 4 == 0:
            request = get(f"/v1/streams/{found[1].decode()}", Last_Event_ID="1")
            # 404: on a busy machine, the stream has expired by now.
            body, head = await client.begin(request, 200, 404)
            if head.startswith(b"HTTP/1.1 200"):
                await _read_events(body, 2)
            client.abort()


async def _read_events(body: asyncio.StreamReader, count: int) -> bytes:
    """Read the first `count` events, or all if there are fewer."""
    events = b""
    while events.count(b"\n\n") < count and b"[DONE]" not in events:
        events += await body.readuntil(b"\n\n")
    return events
