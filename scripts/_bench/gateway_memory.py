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

import aiohttp
import orjson

from scripts._bench.gateway_processes import TEXT, BenchError, gateway
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

Sender = Callable[[aiohttp.ClientSession, Iterator[int]], Coroutine[None, None, None]]
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
    async with gateway(0.0) as (session, pid):
        growth.samples["requests"] = await _sample(session, pid, num_requests, _send_all_kinds)
    growth.judge()
    return growth


async def measure_stores(num_requests: int) -> Growth:
    """Measure series "responses" and "streams" of `num_requests` each. Raises BenchError for an unexpected response."""
    growth = Growth()
    async with gateway(_TICK, *_SMALL_BOUNDS) as (session, pid):
        growth.samples["responses"] = await _sample(session, pid, num_requests, _respond)
        growth.samples["streams"] = await _sample(session, pid, num_requests, _abandon)
    growth.judge()
    return growth


async def _sample(session: aiohttp.ClientSession, pid: int, num_requests: int, send: Sender) -> list[Sample]:
    """Send requests over concurrent connections, and sample the process after each tenth of them."""
    numbers = iter(range(num_requests))
    samples: list[Sample] = []
    for index in range(1, _NUM_SAMPLES + 1):
        count = num_requests * index // _NUM_SAMPLES
        part = itertools.islice(numbers, count - (samples[-1].requests if samples else 0))
        async with asyncio.TaskGroup() as group:
            for _ in range(_CLIENTS):
                group.create_task(send(session, part))
        await asyncio.sleep(_EXPIRY_SECONDS)
        samples.append(Sample(count, resident_bytes(pid) / 1000, open_files(pid)))
        print(f"{count:,}: {samples[-1].kilobytes:,.0f} KB", file=sys.stderr, flush=True)
    return samples


async def _ask(
    session: aiohttp.ClientSession, path: str, fields: object = None, status: int = 200, method: str = "POST"
) -> bytes:
    """Send a request and return the body. Raises BenchError for another status."""
    async with session.request(method, path, json=fields) as response:
        body = await response.read()
    if response.status != status:
        raise BenchError(f"{path}: expected status {status}, not {response.status}: {body[:200]!r}")
    return body


async def _send_all_kinds(session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
    completion = {"model": "fake", "prompt": TEXT, "max_tokens": 4}
    chat = {"model": "fake", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "n": 2}
    for number in numbers:
        match number % 6:
            case 0:
                await _ask(session, "/v1/completions", {**completion, "stream": True})
            case 1:
                await _ask(session, "/v1/completions", {**completion, "logprobs": 2})
            case 2:
                await _ask(session, "/v1/chat/completions", {**chat, "stream": True})
            case 3:
                await _ask(session, "/v1/chat/completions", {**chat, "stop": ["no such text"]})
            case 4:
                await _ask(session, "/v1/completions", {**completion, "best_off": 2}, 400)
            case 5:
                fields = {**completion, "max_tokens": 64, "stream": True}
                (await session.post("/v1/completions", json=fields)).close()


async def _respond(session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
    """Hold conversations of a few turns: stored, streamed, in the background, not stored, deleted, and abandoned."""
    previous: str | None = None
    for turn, number in enumerate(numbers):
        fields: dict[str, object] = {"model": "fake", "input": TEXT * (1 + number % 5), "max_output_tokens": 3}
        match turn % 8:
            case 0 | 1 | 2:
                if previous is not None:
                    fields["previous_response_id"] = previous
                previous = await _create(session, fields)
            case 3:
                await _ask(session, "/v1/responses", {**fields, "stream": True})
            case 4:
                path = f"/v1/responses/{await _create(session, {**fields, 'background': True})}"
                while orjson.loads(await _ask(session, path, method="GET"))["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
                    await asyncio.sleep(_TICK)
            case 5:
                await _ask(session, "/v1/responses", {**fields, "store": False})
            case 6:
                if previous is not None:
                    await _ask(session, f"/v1/responses/{previous}", method="DELETE")
                previous = None
                await _create(session, fields)
            case 7:
                response = await session.post("/v1/responses", json={**fields, "stream": True, "background": True})
                await response.content.readuntil(b"\n\n")
                response.close()


async def _create(session: aiohttp.ClientSession, fields: dict[str, object]) -> str:
    return str(orjson.loads(await _ask(session, "/v1/responses", fields))["id"])


async def _abandon(session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
    """Disconnect from resumable streams after 0 to 5 events.

    One stream in eight does not end. One in four is resumed once and abandoned again.
    """
    for number in numbers:
        fields = {
            "model": "fake",
            "messages": [{"role": "user", "content": TEXT * (1 + number % 5)}],
            "max_tokens": _UNFINISHED if number % 8 == 0 else 1 + number % 7,
            "stream": True,
            "stream_options": {"resumable": True},
        }
        response = await session.post("/v1/chat/completions", json=fields)
        events = await _read_events(response.content, number % 6)
        response.close()
        found = _STREAM_ID.search(events)
        if found is not None and number % 4 == 0:
            # 404: on a busy machine, the stream has expired by now.
            response = await session.get(f"/v1/streams/{found[1].decode()}", headers={"Last-Event-ID": "1"})
            if response.status == 200:
                await _read_events(response.content, 2)
            response.close()


async def _read_events(body: aiohttp.StreamReader, count: int) -> bytes:
    """Read the first `count` events, or all if there are fewer."""
    events = b""
    while events.count(b"\n\n") < count and b"[DONE]" not in events:
        events += await body.readuntil(b"\n\n")
    return events
