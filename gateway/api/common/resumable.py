"""Streams that survive their connection: begun by chat and completions, gone on with by GET /v1/streams/{id}."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator

from aiohttp import web

from gateway.api.common.fan_in import FanIn
from gateway.http.app_keys import DRAIN, IDENTITY, STREAMS, log
from gateway.http.drain import Drain
from gateway.http.sse import HEADERS, Encoder, SseResponse, failure, is_large, stream_events, unexpected_error
from gateway.stores.ids import shown_id
from gateway.stores.streams import StreamLog
from shared.errors import InvalidRequestError, NotFoundError, PeltonError

_LAST_WORDS_SECONDS = 1.0
_EVENT_ID = re.compile(r"[0-9]{1,18}")


async def stream(
    request: web.Request, identifier: str, events: FanIn, encoder: Encoder, *, resumable: bool
) -> web.StreamResponse:
    """Enters a generation and streams it.

    Args:
        resumable: it runs apart from its connection, and can be gone on with by its id.
    """
    if not resumable:
        async with events:
            return await stream_events(request, events, encoder)
    streams = request.app[STREAMS]
    record = streams.open(identifier, request[IDENTITY].key_hash)
    streams.run(identifier, fill(record, events, encoder, request.app[DRAIN], numbered))
    return await stream_log(request, identifier, record, 0, _failed)


async def resume_stream(request: web.Request) -> web.StreamResponse:
    """GET /v1/streams/{id}: what follows the event that `Last-Event-ID` names, or all; 204 where nothing will."""
    identifier = request.match_info["id"]
    if identifier.startswith("resp_"):
        message = f"There is no stream with the id {shown_id(identifier)}: see /v1/responses/{{id}}?stream=true."
        raise NotFoundError(message)
    record = request.app[STREAMS].find(identifier, request[IDENTITY].key_hash)
    return await stream_log(request, identifier, record, _last_seen(request, record), _failed)


def _failed(error: PeltonError, _: int) -> bytes:
    return failure(error)


def _last_seen(request: web.Request, record: StreamLog) -> int:
    name = "Last-Event-ID"
    value = request.headers.get(name, "")
    if not value:
        return 0
    if not _EVENT_ID.fullmatch(value) or int(value) > record.last:
        raise InvalidRequestError(f"{name} must be the id of an event of this stream.", param=name)
    return int(value)


async def stream_log(
    request: web.Request, identifier: str, record: StreamLog, seen: int, failed: Callable[[PeltonError, int], bytes]
) -> web.StreamResponse:
    """Sends the events behind number `seen`, until the last; 204 where that was seen.

    Args:
        failed: the event that ends the stream where it cannot go on, behind so many.
    """
    if record.ended and record.error is None and seen >= record.last:
        return web.Response(status=204)
    if request.method == "HEAD":
        return web.Response(headers=HEADERS)
    async with SseResponse(request) as sse:
        with request.app[STREAMS].claim(identifier, record):
            reader = _Reader(sse, record, seen)
            try:
                await reader.follow()
            except asyncio.CancelledError:
                error = request.app[DRAIN].take_over_cancellation()
                if error is None:
                    raise
                await reader.last_words(failed, error)
            except PeltonError as error:
                await reader.fail(failed, error)
    await sse.response.write_eof()
    return sse.response


class _Reader:
    """Sends the events of a log behind number `seen`."""

    def __init__(self, sse: SseResponse, record: StreamLog, seen: int) -> None:
        self._sse = sse
        self._record = record
        self._seen = seen

    async def follow(self) -> None:
        """Until the last. Raises PeltonError where they do not go on."""
        record = self._record
        while True:
            if events := record.after(self._seen):
                self._seen += len(events)  # first: what is written is written, also where the wait for it is ended
                await self._sse.send(b"".join(events))
            elif record.error is not None:
                raise record.error
            elif record.ended:
                return
            else:
                await record.news()

    async def last_words(self, failed: Callable[[PeltonError, int], bytes], error: PeltonError) -> None:
        """All streams are ended, so what fills the log is too: its own last event says more than `error`."""
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self.follow()
        except TimeoutError:
            await self.fail(failed, error)
        except PeltonError as own:
            await self.fail(failed, own)

    async def fail(self, failed: Callable[[PeltonError, int], bytes], error: PeltonError) -> None:
        """Ends the stream, as a plain response where nothing has been sent."""
        if not self._sse.begun:
            raise error
        await self._sse.send(failed(error, self._seen))


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
    """Runs a generation into a log. It counts as a request in flight, with or without a connection.

    Args:
        framed: makes separate events of what the encoder gives.
        on_admission: what the encoder gives first, as soon as the generation has its place.
        on_cancel: what the encoder gives last where it is ended on demand.
    """
    error: PeltonError | None = None
    try:
        with drain.admit():
            try:
                async with events:
                    _append(record, framed(record, on_admission()))
                    async for index, prompt_index, delta in events:
                        if is_large(delta):
                            data = await asyncio.to_thread(encoder.encode, index, prompt_index, delta)
                        else:
                            data = encoder.encode(index, prompt_index, delta)
                        _append(record, framed(record, data))
                _append(record, framed(record, encoder.end()))
            except asyncio.CancelledError:
                error = drain.take_over_cancellation()
                if error is None:
                    _append(record, framed(record, on_cancel()))
                    raise
    except PeltonError as refusal:
        error = refusal
    except Exception:  # noqa: BLE001 - handed over as an error to whoever reads
        log.exception("stream failed")
        error = unexpected_error()
    finally:
        if error is not None and record.last:
            _append(record, framed(record, encoder.failed(error)))
            error = None
        record.end(error)
        error = None  # its traceback holds this frame: together they would wait for the garbage collector


def _append(record: StreamLog, events: Iterator[bytes]) -> None:
    for event in events:
        record.append(event)


def numbered(record: StreamLog, data: bytes) -> Iterator[bytes]:
    """Each event with its number as its id. What is numbered next must have been appended."""
    for event in separate(data):
        yield b"id: %d\n%b" % (record.last + 1, event)


def separate(data: bytes) -> Iterator[bytes]:
    """The events of framed data; JSON has no line ends of its own."""
    for event in data.split(b"\n\n")[:-1]:
        yield event + b"\n\n"
