"""Peer processes of the gateway benchmark.

`gateway_peers.py worker DIRECTORY SECONDS` runs a worker without a model. Each request gets its prompt repeatedly, one
token every SECONDS.

`gateway_peers.py server CHUNK_BYTES SECONDS` runs an aiohttp server that only writes server-sent events, the baseline
of the gateway's cost per token. It prints its port; every open stream gets one event every SECONDS.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import uvloop
from aiohttp import web

from shared.messages import GatewayMessage, Submit
from tests.fakes.fake_worker import FakeWorker


class _DiscardingList(list[GatewayMessage]):
    """List that stays empty, because the fake worker would keep hundreds of thousands of messages."""

    def append(self, message: GatewayMessage) -> None:
        """Discard the message."""


def _repeated_prompt(submit: Submit) -> list[int]:
    count, prompt = submit.sampling.max_tokens, submit.token_ids
    return (prompt * (count // len(prompt) + 1))[:count]


def run_worker(directory: Path, seconds: float) -> None:
    """Serve until the process is killed."""
    worker = FakeWorker(
        directory, delay=seconds, script=_repeated_prompt, max_num_seqs=8192, max_model_len=1 << 20, num_pages=1 << 20
    )
    worker.received = _DiscardingList()
    with worker:
        threading.Event().wait()


async def run_server(chunk_bytes: int, seconds: float) -> None:
    """Serve until the process is killed. All streams wake at once, as after a step of a worker."""
    chunk = b"data: " + b"x" * (chunk_bytes - 8) + b"\n\n"
    tick = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await tick.wait()
            await response.write(chunk)

    app = web.Application()
    app.router.add_post("/{path:.*}", stream)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(runner.addresses[0][1], flush=True)
    while True:
        await asyncio.sleep(seconds)
        finished, tick = tick, asyncio.Event()
        finished.set()


if __name__ == "__main__":
    kind, argument, period = sys.argv[1:]
    if kind == "worker":
        run_worker(Path(argument), float(period))
    else:
        uvloop.run(run_server(int(argument), float(period)))
