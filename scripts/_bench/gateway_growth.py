"""Memory of a gateway process over many requests: whole and streamed, chat and completions, refused ones, and ones that
their client leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts._bench.gateway_processes import BenchError, gateways, until_ready
from scripts._bench.process_memory import resident_bytes
from scripts.loadtest.server_process import free_port

_CLIENTS = 24
_SHARES = (0.1, 0.5, 1.0)
_TEXT = "the quick brown fox jumps over the lazy dog "
_MESSAGES = [{"role": "user", "content": _TEXT}]


@dataclass
class Growth:
    """Resident kilobytes of the gateway after so many requests, and what 1,000 requests add after the first of them."""

    kilobytes: dict[int, float] = field(default_factory=dict)
    kilobytes_per_1000_requests: float = 0.0

    def report(self) -> str:
        """For people."""
        lines = [f"after {count:,} requests: {size:,.0f} KB" for count, size in self.kilobytes.items()]
        first, last = min(self.kilobytes), max(self.kilobytes)
        growth = f"{self.kilobytes_per_1000_requests:.2f} KB per 1,000 requests"
        return "\n".join([*lines, f"from {first:,} to {last:,}: {growth}"])


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: what is sent, the status that it must have, and whether its client leaves at once."""

    data: bytes
    status: int = 200
    leaves: bool = False


def kinds() -> list[Kind]:
    """One of each."""
    completion = {"model": "fake", "prompt": _TEXT, "max_tokens": 4}
    chat = {"model": "fake", "messages": _MESSAGES, "max_tokens": 4, "n": 2}
    return [
        Kind(_post("/v1/completions", **completion, stream=True)),
        Kind(_post("/v1/completions", **completion, logprobs=2)),
        Kind(_post("/v1/chat/completions", **chat, stream=True)),
        Kind(_post("/v1/chat/completions", **chat, stop=["no such text"])),
        Kind(_post("/v1/completions", **completion, best_off=2), status=400),
        Kind(_post("/v1/completions", **{**completion, "max_tokens": 64}, stream=True), leaves=True),
    ]


def _post(path: str, **fields: object) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def measure_growth(num_requests: int) -> Growth:
    """Sends them from a few connections that are kept, until their client leaves. Raises BenchError."""
    growth = Growth()
    with tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp") as directory:
        port = free_port()
        with gateways(Path(directory), port, 1, 0.0) as (pid,):
            await until_ready(port)
            done = 0
            for share in _SHARES:
                count = round(num_requests * share)
                turns = itertools.islice(itertools.cycle(kinds()), count - done)
                async with asyncio.TaskGroup() as group:
                    for _ in range(_CLIENTS):
                        group.create_task(_client(port, turns))
                done = count
                growth.kilobytes[count] = resident_bytes(pid) / 1000
    sizes = list(growth.kilobytes.items())
    (first, before), (last, after) = sizes[0], sizes[-1]
    growth.kilobytes_per_1000_requests = (after - before) / (last - first) * 1000
    return growth


async def _client(port: int, turns: Iterator[Kind]) -> None:
    """One request after the other, from a queue that all clients share."""
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    for kind in turns:
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = connection
        writer.write(kind.data)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 %d " % kind.status):
            raise BenchError(f"not {kind.status}: {head[:200]!r}")
        if kind.leaves:
            writer.transport.abort()
            connection = None
        elif b"Transfer-Encoding: chunked" in head:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            length = head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
    if connection is not None:
        connection[1].close()
