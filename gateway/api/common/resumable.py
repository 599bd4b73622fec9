"""Streams that survive their connection: chat and completions start them, GET /v1/streams/{id} resumes them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator

from aiohttp import web

from gateway.api.common.envelope import Tally
from gateway.api.common.fan_in import FanIn, open_events
from gateway.api.common.fields import invalid
from gateway.api.common.prepared import PreparedRequest
from gateway.http.app_keys import IDENTITY, SERVICES, log
from gateway.http.drain import Drain
from gateway.http.sse import HEADERS, Encoder, SseResponse, failure, in_thread_if_large, stream_events, unexpected_error
from gateway.stores.ids import shown_id
from gateway.stores.streams import StreamLog
from shared.errors import NotFoundError, PeltonError

_FINISH_SECONDS = 1.0
_EVENT_ID = re.compile(r"[0-9]{1,18}")


async def stream(
    request: web.Request, prepared: PreparedRequest, new_encoder: Callable[[Tally], Encoder]
) -> web.StreamResponse:
    """Run a request and stream its events. A resumable request runs independently of its connection.

    Args:
        request: The HTTP request.
        prepared: The prepared request. Its stream is resumed by the id of the response.
        new_encoder: Returns the encoder of the events, given the counts for the usage.
    """
    events = open_events(request, prepared)
    if not prepared.options.resumable:
        async with events:
            return await stream_events(request, events, new_encoder(events.tally))
    streams, identifier = request.app[SERVICES].streams, prepared.envelope.identifier
    record = streams.open(identifier, request[IDENTITY].key_hash)
    streams.run(identifier, fill(record, events, new_encoder(events.tally), request.app[SERVICES].drain, numbered))
    return await stream_log(request, identifier, record, 0, _failure)


async def resume_stream(request: web.Request) -> web.StreamResponse:
    """Stream the events after the one that `Last-Event-ID` names, or all of them; 204 if no event follows."""
    identifier = request.match_info["id"]
    if identifier.startswith("resp_"):
        shown = shown_id(identifier)
        raise NotFoundError(f"There is no stream with the id {shown}. Use /v1/responses/{{id}}?stream=true.")
    record = request.app[SERVICES].streams.find(identifier, request[IDENTITY].key_hash)
    return await stream_log(request, identifier, record, _last_seen(request, record), _failure)


def _failure(error: PeltonError, _num_sent: int) -> bytes:
    return failure(error)


def _last_seen(request: web.Request, record: StreamLog) -> int:
    name = "Last-Event-ID"
    value = request.headers.get(name, "")
    if not value:
        return 0
    if not _EVENT_ID.fullmatch(value) or int(value) > record.last:
        raise invalid(name, f"must be the id of an event of this stream, got {value[:32]!r}.")
    return int(value)


async def stream_log(
    request: web.Request, identifier: str, record: StreamLog, seen: int, failed: Callable[[PeltonError, int], bytes]
) -> web.StreamResponse:
    """Stream the events after number `seen`, up to the last; 204 if the client has seen the last.

    Args:
        request: The HTTP request.
        identifier: Id of the stream.
        record: Log of the stream's events.
        seen: Number of the last event that the client has.
        failed: Encodes an error as the last event; its second argument is the number of events before it.
    """
    if record.ended and record.error is None and seen >= record.last:
        return web.Response(status=204)
    if request.method == "HEAD":
        return web.Response(headers=HEADERS)
    async with SseResponse(request) as sse:

        async def follow() -> None:
            nonlocal seen
            while True:
                if events := record.after(seen):
                    seen += len(events)  # first: a cancelled wait does not undo the write
                    await sse.send(b"".join(events))
                elif record.error is not None:
                    raise record.error
                elif record.ended:
                    return
                else:
                    await record.news()

        with request.app[SERVICES].streams.claim(identifier, record):
            try:
                try:
                    await follow()
                except asyncio.CancelledError:
                    shutdown = request.app[SERVICES].drain.take_over_cancellation()
                    if shutdown is None:
                        raise
                    # The task that fills the log is cancelled too, and the last event that it writes is more precise.
                    try:
                        async with asyncio.timeout(_FINISH_SECONDS):
                            await follow()
                    except TimeoutError:
                        raise shutdown from None
            except PeltonError as error:
                if not sse.has_started:
                    raise
                await sse.send(failed(error, seen))
    await sse.response.write_eof()
    return sse.response


async def fill(
    record: StreamLog,
    events: FanIn,
    encoder: Encoder,
    drain: Drain,
    framed: Callable[[StreamLog, bytes], Iterator[bytes]],
    *,
    on_admission: Callable[[], bytes] = bytes,
    on_cancel: Callable[[], bytes] = bytes,
) -> None:
    """Run a request and append its events to a log. It counts as in flight with and without a connection.

    Args:
        record: The log.
        events: The request's events, not yet entered.
        encoder: Encoder of the events.
        drain: Counter of requests in flight.
        framed: Splits the encoder's bytes into the events of the log.
        on_admission: Returns the first events, once the request has been admitted.
        on_cancel: Returns the last events if the request is cancelled by its client.
    """
    error: PeltonError | None = None
    try:
        with drain.admit():
            try:
                async with events:
                    _append(record, framed(record, on_admission()))
                    async for index, prompt_index, delta in events:
                        data = await in_thread_if_large(encoder.encode, index, prompt_index, delta)
                        _append(record, framed(record, data))
                _append(record, framed(record, encoder.end()))
            except asyncio.CancelledError:
                error = drain.take_over_cancellation()
                if error is None:
                    _append(record, framed(record, on_cancel()))
                    raise
    except PeltonError as refusal:
        error = refusal
    except Exception:  # noqa: BLE001 - clients that read the log get an error
        log.exception("stream failed")
        error = unexpected_error()
    finally:
        if error is not None and record.last:
            _append(record, framed(record, encoder.failed(error)))
            error = None
        record.end(error)
        error = None  # break the reference cycle with the traceback, which holds this frame


def _append(record: StreamLog, events: Iterator[bytes]) -> None:
    for event in events:
        record.append(event)


def numbered(record: StreamLog, data: bytes) -> Iterator[bytes]:
    """Yield each event with its number as its id. Append each before asking for the next."""
    for event in separate(data):
        yield b"id: %d\n%b" % (record.last + 1, event)


def separate(data: bytes) -> Iterator[bytes]:
    """Yield the single events of encoded data; their JSON has no newlines."""
    for event in data.split(b"\n\n")[:-1]:
        yield event + b"\n\n"
