"""Memory of a gateway process over many requests: whole and streamed, chat and completions, refused ones, and ones that
their client leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts._bench.gateway_client import Client, post
from scripts._bench.gateway_processes import gateways, until_ready
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
        Kind(post("/v1/completions", **completion, stream=True)),
        Kind(post("/v1/completions", **completion, logprobs=2)),
        Kind(post("/v1/chat/completions", **chat, stream=True)),
        Kind(post("/v1/chat/completions", **chat, stop=["no such text"])),
        Kind(post("/v1/completions", **completion, best_off=2), status=400),
        Kind(post("/v1/completions", **{**completion, "max_tokens": 64}, stream=True), leaves=True),
    ]


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
    client = Client(port)
    for kind in turns:
        if kind.leaves:
            await client.begin(kind.data, kind.status)
            client.leave()
        else:
            await client.ask(kind.data, kind.status)
    client.leave()
