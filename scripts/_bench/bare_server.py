"""An aiohttp server that does nothing but write server-sent events: what a gateway's cost per token is compared with.

`python bare_server.py CHUNK_BYTES SECONDS` prints its port. Every SECONDS each open stream gets one event.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import web


class Ticker:
    """Wakes all streams at once, as a step of a worker does."""

    def __init__(self) -> None:
        self._tick = asyncio.Event()

    async def run(self, seconds: float) -> None:
        """Ticks until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def wait(self) -> None:
        """Until the next tick."""
        await self._tick.wait()


async def main(chunk_bytes: int, seconds: float) -> None:
    """Serves until the process is ended."""
    chunk = b"data: " + b"x" * (chunk_bytes - 8) + b"\n\n"
    ticker = Ticker()

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await ticker.wait()
            await response.write(chunk)

    app = web.Application()
    app.router.add_post("/{path:.*}", stream)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await ticker.run(seconds)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as event_loop:
        event_loop.run(main(int(sys.argv[1]), float(sys.argv[2])))
