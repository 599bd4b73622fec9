"""Server-sent events: framing, time of the headers, keep-alive comments, failures after the first byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from aiohttp import HttpVersion11, web

from gateway.flow.events import TextDelta
from gateway.flow.outbox import Receiver
from gateway.http.aiohttp_internals import write_chunk
from gateway.http.app_keys import SERVICES, log
from gateway.http.errors import dump_json, error_object
from shared.errors import InternalError, PeltonError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
LARGE_REPORT = 512
"""Number of prompt log-probabilities above which an event is encoded in a thread, so that others do not wait."""
_KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Encoder(Protocol):
    """Conversion of deltas to the framed events of one endpoint."""

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """Return zero or more complete `data:` events for a delta."""

    def end(self) -> bytes:
        """Return the events that end a successful stream."""

    def failed(self, error: PeltonError) -> bytes:
        """Return the events that end a failed stream."""


class Events(Protocol):
    """Events of the generations of a request; see api.common.fan_in.FanIn."""

    def __aiter__(self) -> AsyncIterator[tuple[int, int, TextDelta]]: ...

    def pass_to(self, receiver: Receiver) -> None:
        """Pass deltas that arrive while the iteration waits to `receiver`."""

    def event(self, prompt_index: int, delta: TextDelta) -> tuple[int, int, TextDelta]:
        """Convert a delta to the event that the iteration would yield; for the receiver."""


class SseResponse:
    """One event stream.

    Headers are sent with the first event, so that an earlier failure gets a status of its own, or with the first
    keep-alive comment after `keepalive_interval` seconds of silence.

    Args:
        request: The HTTP request.
        keep_alive: Function that returns the bytes to send instead of the comment.
    """

    def __init__(self, request: web.Request, keep_alive: Callable[[], bytes] | None = None) -> None:
        self._request = request
        self._keep_alive_bytes = keep_alive
        self._protocol = request.protocol
        self._interval = request.app[SERVICES].keepalive_interval
        self._prepare_lock = asyncio.Lock()
        self._last_write = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._keepalive: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(headers=HEADERS)
        if request.version < HttpVersion11:
            # Only the end of the connection ends such a stream, also where the client asked to keep it.
            self.response.force_close()

    @property
    def has_started(self) -> bool:
        """True if the status line has been sent."""
        return self.response.prepared

    async def __aenter__(self) -> Self:
        self._set_timer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._keepalive is not None:
            self._keepalive.cancel()
            await asyncio.gather(self._keepalive, return_exceptions=True)

    async def send(self, data: bytes) -> None:
        """Write data. A client that does not read is disconnected by HttpProtocol.

        Raises:
            ConnectionError: The client has disconnected.
        """
        self._last_write = time.monotonic()
        if not self.response.prepared:
            await self._prepare()
        await self.response.write(data)

    @property
    def has_chunks(self) -> bool:
        """True if the response uses HTTP/1.1 chunks, which `write` produces. Known after the first send."""
        return self.response.headers.get("Transfer-Encoding") == "chunked"

    @property
    def writable(self) -> bool:
        """True if the client is connected and reads."""
        transport = self._protocol.transport
        return transport is not None and not self._protocol.writing_paused and not transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write data as `send` does, without its coroutines, while `has_chunks` and `writable` are true.

        The coroutines take longer per token than everything else in this module.
        """
        transport = self._protocol.transport
        if transport is not None:
            self._last_write = time.monotonic()
            write_chunk(transport, data)

    async def _prepare(self) -> None:
        async with self._prepare_lock:
            if not self.response.prepared:
                await self.response.prepare(self._request)

    def _set_timer(self) -> None:
        delay = max(0.0, self._last_write + self._interval - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        """Create a task for the keep-alive if the stream is silent; most streams never need one."""
        if time.monotonic() - self._last_write >= self._interval:
            self._keepalive = asyncio.create_task(self._send_keepalive())
        else:
            self._set_timer()

    async def _send_keepalive(self) -> None:
        await self.send(_KEEP_ALIVE if self._keep_alive_bytes is None else self._keep_alive_bytes())
        self._set_timer()


async def stream_events(
    request: web.Request, events: Events, encoder: Encoder, *, keep_alive: Callable[[], bytes] | None = None
) -> web.StreamResponse:
    """Write the deltas of a generation as events.

    Failures before the first byte are raised; later ones become an error event.
    """
    async with SseResponse(request, keep_alive) as sse:
        try:
            await _send_events(sse, events, encoder)
            await sse.send(encoder.end())
        except asyncio.CancelledError:
            error = request.app[SERVICES].drain.take_over_cancellation()
            if error is None:
                raise
            await _fail(sse, encoder, error)
        except PeltonError as error:
            await _fail(sse, encoder, error)
        except ConnectionError:
            raise
        except Exception:
            if not sse.has_started:
                raise
            log.exception("stream failed")
            await _fail(sse, encoder, unexpected_error())
    await sse.response.write_eof()
    return sse.response


async def _send_events(sse: SseResponse, events: Events, encoder: Encoder) -> None:
    """Write the first event, the last events, and all events while the client is behind; _Writer writes the others."""
    has_receiver = False
    async for index, prompt_index, delta in events:
        data = await in_thread_if_large(encoder.encode, index, prompt_index, delta)
        if data:
            await sse.send(data)
            if not has_receiver and sse.has_chunks:
                has_receiver = True
                events.pass_to(_Writer(sse, events, encoder))


class _Writer:
    """Receiver that writes events while the stream's task waits.

    Waking the task for each token would cost more than all other work on it. See flow.outbox.Receiver.
    """

    __slots__ = ("_encode", "_event", "_sse")

    def __init__(self, sse: SseResponse, events: Events, encoder: Encoder) -> None:
        self._sse = sse
        self._event = events.event
        self._encode = encoder.encode

    def ready(self) -> bool:
        return self._sse.writable

    def receive(self, deltas: Sequence[TextDelta]) -> None:
        data = b"".join([self._encode(*self._event(0, delta)) for delta in deltas])
        if data:
            self._sse.write(data)


async def in_thread_if_large(
    work: Callable[[int, int, TextDelta], T], index: int, prompt_index: int, delta: TextDelta
) -> T:
    """Return `work(index, prompt_index, delta)`, called in a thread if the delta has a large report on its prompt."""
    if delta.prompt_logprobs is not None and len(delta.prompt_logprobs) >= LARGE_REPORT:
        return await asyncio.to_thread(work, index, prompt_index, delta)
    return work(index, prompt_index, delta)


async def _fail(sse: SseResponse, encoder: Encoder, error: PeltonError) -> None:
    if not sse.has_started:
        raise error
    await sse.send(encoder.failed(error))


def unexpected_error() -> InternalError:
    """Return the error that a client sees for an unexpected exception."""
    return InternalError("The server failed. Its log has the details under the request id.")


def failure(error: PeltonError) -> bytes:
    """Return the events that end a failed stream of chunks."""
    return data_event(error_object(error)) + DONE


def data_event(value: object) -> bytes:
    """Return one `data:` event."""
    return b"data: " + dump_json(value) + b"\n\n"
