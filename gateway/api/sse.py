"""Server-sent events: framing, when headers go out, keep-alive comments, failures after the first byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web

from gateway.api.logprobs import LARGE_REPORT
from gateway.flow.events import TextDelta
from gateway.keys import DRAIN, LIMITS, log
from gateway.responses import dump_json, error_object
from shared.errors import InternalError, PeltonError

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Encoder(Protocol):
    """Turns events into framed chunks of one endpoint."""

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """Zero or more whole `data:` events."""

    def end(self) -> bytes:
        """What follows the last event of a stream that succeeded."""


class SseResponse:
    """One event stream.

    Headers go out with the first event, so that a failure before it can still be answered with its own status, or
    with the first keep-alive comment after `keepalive_interval` seconds of silence.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._interval = request.app[LIMITS].keepalive_interval
        self._prepare_lock = asyncio.Lock()
        self._last_write = time.monotonic()
        self._keepalive: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def begun(self) -> bool:
        """Whether the status is out."""
        return self.response.prepared

    async def __aenter__(self) -> Self:
        self._keepalive = asyncio.create_task(self._send_keepalives())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
            await asyncio.gather(self._keepalive, return_exceptions=True)

    async def send(self, data: bytes) -> None:
        """One write. Raises ConnectionError when the client is gone; a client that does not read is cut off by
        HttpProtocol, and so is gone.
        """
        self._last_write = time.monotonic()
        if not self.response.prepared:
            await self._prepare()
        await self.response.write(data)

    async def _prepare(self) -> None:
        async with self._prepare_lock:
            if not self.response.prepared:
                await self.response.prepare(self._request)

    async def _send_keepalives(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._last_write + self._interval - time.monotonic()))
            if time.monotonic() - self._last_write >= self._interval:
                await self.send(_KEEP_ALIVE)


async def stream_events(
    request: web.Request, events: AsyncIterator[tuple[int, int, TextDelta]], encoder: Encoder
) -> web.StreamResponse:
    """Writes a generation as events. Raises what fails before the first byte; later failures become an error event."""
    async with SseResponse(request) as sse:
        try:
            async for index, prompt_index, delta in events:
                if is_large(delta):
                    data = await asyncio.to_thread(encoder.encode, index, prompt_index, delta)
                else:
                    data = encoder.encode(index, prompt_index, delta)
                if data:
                    await sse.send(data)
            await sse.send(encoder.end())
        except asyncio.CancelledError:
            error = request.app[DRAIN].take_over_cancellation()
            if error is None:
                raise
            await _fail(sse, error)
        except PeltonError as error:
            await _fail(sse, error)
        except ConnectionError:
            raise
        except Exception:
            if not sse.begun:
                raise
            log.exception("stream failed")
            await _fail(sse, InternalError("The server failed; the request id finds the details in its log."))
    await sse.response.write_eof()
    return sse.response


def is_large(delta: TextDelta) -> bool:
    """Whether shaping an event takes so long that it belongs in a thread."""
    return delta.prompt_logprobs is not None and len(delta.prompt_logprobs) >= LARGE_REPORT


async def _fail(sse: SseResponse, error: PeltonError) -> None:
    if not sse.begun:
        raise error
    await sse.send(data_event(error_object(error)) + DONE)


def data_event(value: object) -> bytes:
    """One `data:` event."""
    return b"data: " + dump_json(value) + b"\n\n"
