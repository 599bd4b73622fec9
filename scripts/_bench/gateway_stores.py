"""Memory of a gateway process that keeps responses and streams, over many of both: small bounds are reached soon, and
nothing may grow from then on. With the default bounds: what they let it grow to.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import orjson

from scripts._bench.gateway_client import Client, bare, post
from scripts._bench.gateway_processes import gateways, until_ready
from scripts._bench.process_memory import open_files, resident_bytes
from scripts.loadtest.server_process import free_port

_CLIENTS = 32
_TICK = 0.01
_SMALL_BOUNDS = ("--response-store-size", str(32 << 20), "--stream-buffer-size", str(1 << 20), "--stream-grace", "1")
_SETTLE_SECONDS = 2.0
_SHARES = tuple(share / 10 for share in range(1, 11))
_WARM_SHARE = 0.4
_MOST_GROWTH = 1.03
_TEXT = "the quick brown fox jumps over the lazy dog "
_LONG_TEXT = _TEXT * 400
_ENDLESS = 10_000
_LONG = 100
_STREAM_ID = re.compile(rb'"id":"(chatcmpl-[0-9a-f]+)"')


@dataclass
class Sample:
    """The gateway process after so many requests."""

    requests: int
    kilobytes: float
    open_files: int


@dataclass
class Kept:
    """Samples over stored responses and over abandoned streams.

    Attributes:
        flat: for each, whether at the end the process is at most 3 % larger than when 40 % were done.
    """

    responses: list[Sample] = field(default_factory=list)
    streams: list[Sample] = field(default_factory=list)
    flat: dict[str, bool] = field(default_factory=dict)

    def judge(self) -> None:
        """Says what is flat."""
        self.flat = {name: growth(samples) < _MOST_GROWTH for name, samples in self._parts() if samples}

    def report(self) -> str:
        """For people."""
        lines = []
        for name, samples in self._parts():
            lines += [
                f"{name}: after {one.requests:,}: {one.kilobytes:,.0f} KB, {one.open_files} files" for one in samples
            ]
            if samples:
                verdict = "flat" if self.flat[name] else "it grows"
                lines.append(f"{name}: at the end {growth(samples):.3f} of what it was at 40 %: {verdict}")
        return "\n".join(lines)

    def _parts(self) -> tuple[tuple[str, list[Sample]], ...]:
        return ("responses", self.responses), ("streams", self.streams)


def growth(samples: list[Sample]) -> float:
    """The last one's memory, of that of the first at or behind 40 % of the requests."""
    warm = next(one for one in samples if one.requests >= _WARM_SHARE * samples[-1].requests)
    return samples[-1].kilobytes / warm.kilobytes


async def measure_stores(num_requests: int, *, default_bounds: bool = False) -> Kept:
    """So many responses, then as many streams. Raises BenchError where an answer is not as it must be.

    Args:
        default_bounds: nothing is set; responses and streams are so much longer that the bounds are reached.
    """
    kept = Kept()
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        more, text, length = ((), _LONG_TEXT, _LONG) if default_bounds else (_SMALL_BOUNDS, _TEXT, 1)
        with gateways(Path(directory), port, 1, _TICK, *more) as (pid,):
            await until_ready(port)
            await _run(port, pid, num_requests, partial(_respond, text), kept.responses)
            await _run(port, pid, num_requests, partial(_abandon, length), kept.streams)
    kept.judge()
    return kept


async def _run(
    port: int,
    pid: int,
    num_requests: int,
    talk: Callable[[Client, Iterator[int]], Coroutine[None, None, None]],
    samples: list[Sample],
) -> None:
    numbers = iter(range(num_requests))
    done = 0
    for share in _SHARES:
        count = round(num_requests * share)
        turns = itertools.islice(numbers, count - done)
        clients = [Client(port) for _ in range(_CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(talk(client, turns))
        for client in clients:
            client.leave()
        done = count
        await asyncio.sleep(_SETTLE_SECONDS)  # twice the grace: what is to be forgotten is
        samples.append(Sample(count, resident_bytes(pid) / 1000, open_files(pid)))
        print(f"{count:,}: {samples[-1].kilobytes:,.0f} KB", file=sys.stderr, flush=True)


async def _respond(text: str, client: Client, turns: Iterator[int]) -> None:
    """Conversations of a few turns; some of them streamed, some in the background, some not stored, some deleted."""
    previous: str | None = None
    for turn, number in enumerate(turns):
        fields: dict[str, object] = {"model": "fake", "input": text * (1 + number % 5), "max_output_tokens": 3}
        match turn % 8:
            case 0 | 1 | 2:
                if previous is not None:
                    fields["previous_response_id"] = previous
                previous = await _create(client, fields)
            case 3:
                await client.ask(post("/v1/responses", **fields, stream=True))
            case 4:
                background = await _create(client, {**fields, "background": True})
                while await _status(client, background) in ("queued", "in_progress"):  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(_TICK)
            case 5:
                await client.ask(post("/v1/responses", **fields, store=False))
            case 6:
                if previous is not None:
                    await client.ask(bare("DELETE", f"/v1/responses/{previous}"))
                previous = None
                await _create(client, fields)
            case 7:
                body, _ = await client.begin(post("/v1/responses", **fields, stream=True, background=True), 200)
                await body.readuntil(b"\n\n")
                client.leave()


async def _create(client: Client, fields: dict[str, object]) -> str:
    return str(orjson.loads(await client.ask(post("/v1/responses", **fields)))["id"])


async def _status(client: Client, identifier: str) -> str:
    return str(orjson.loads(await client.ask(bare("GET", f"/v1/responses/{identifier}")))["status"])


async def _abandon(length: int, client: Client, turns: Iterator[int]) -> None:
    """Streams that their client leaves at their first, second.. event, or before it; some run on without an end, and to
    some it comes back once, to leave them again.
    """
    for number in turns:
        fields = {
            "model": "fake",
            "messages": [{"role": "user", "content": _TEXT * (1 + number % 5)}],
            "max_tokens": _ENDLESS if number % 8 == 0 else length * (1 + number % 7),
            "stream": True,
            "stream_options": {"resumable": True},
        }
        body, _ = await client.begin(post("/v1/chat/completions", **fields), 200)
        events = await _events(body, number % 6)
        client.leave()
        found = _STREAM_ID.search(events)
        if found is not None and number % 4 == 0:
            request = bare("GET", f"/v1/streams/{found[1].decode()}", Last_Event_ID="1")
            # On a busy machine it comes too late.
            body, head = await client.begin(request, 200, 404)
            if head.startswith(b"HTTP/1.1 200"):
                await _events(body, 2)
            client.leave()


async def _events(body: asyncio.StreamReader, count: int) -> bytes:
    """The first events, or all where there are fewer."""
    events = b""
    while events.count(b"\n\n") < count and b"[DONE]" not in events:
        events += await body.readuntil(b"\n\n")
    return events
