"""Store of the events of resumable streams.

A stream runs in a task of its own and writes to its log. Connections only read the log. A reader claims the stream. A
stream that nobody has claimed for the grace period is cancelled, if it still runs, and removed.

When the store is full, the key with the most data loses its oldest events, so that a key with little data loses
nothing to others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager

from gateway.stores.holdings import Holdings
from gateway.stores.ids import shown_id
from shared.errors import NotFoundError, PeltonError

_EVENT_OVERHEAD = 128
"""Approximate bytes of an event besides its text."""
_LOG_OVERHEAD = 1536
"""Approximate bytes of a stream besides its events; counted with its first event."""
_STREAM_SHARE = 16
"""Divisor of the store's size that gives the maximum size of one stream."""
_SLACK = 1024
_PIECE = 65_536
"""Bytes of events that a reader takes at a time.

Unread data stays in the connection's buffer, and thousands of clients may read a long stream.
"""


class StreamLog:
    """Events of one stream, numbered from 1. The oldest ones may have been removed.

    Attributes:
        owner: Hash of the key that created the stream.
        ended: True if no event will follow.
        first: Number of the oldest event that is kept.
    """

    def __init__(self, identifier: str, owner: bytes, store: StreamStore) -> None:
        self.identifier = identifier
        self.owner = owner
        self.ended = False
        self._error: PeltonError | None = None
        self.num_bytes = 0
        # The rest is for the store.
        self.num_claims = 0
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._events: deque[bytes] = deque()
        self.first = 1
        self._news: asyncio.Event | None = None

    @property
    def error(self) -> PeltonError | None:
        """New exception that explains a premature end; None if the stream ended regularly."""
        return None if self._error is None else self._error.untouched()

    @property
    def last(self) -> int:
        """Number of the last event; 0 if there was none."""
        return self.first + len(self._events) - 1

    def append(self, event: bytes) -> None:
        """Append a framed event. Does nothing after the end, because the stream may have been deleted while it ran."""
        if self.ended:
            return
        self._events.append(event)
        self._store.on_append(self, _size(self.last, event))
        self._wake()

    def end(self, error: PeltonError | None = None) -> None:
        """Mark the end. `error` is for a stream whose events do not tell how it ended. Only the first call counts."""
        if self.ended:
            return
        self.ended = True
        self._error = None if error is None else error.untouched()
        self._wake()

    def on_task_done(self) -> None:
        """Mark the end for a task that was cancelled before it started; for the store."""
        self.task = None
        self.end()

    def after(self, number: int) -> Sequence[bytes]:
        """Return events after a number, as many as are sent at a time.

        Raises:
            NotFoundError: The next event has been removed. The status is not 503, because a retry would not bring
                it back.
        """
        if number + 1 < self.first:
            raise NotFoundError(
                "The events after this number are no longer kept. Send the request again.", code="stream_expired"
            )
        found: list[bytes] = []
        size = 0
        # Index the deque: access is fast at its ends, and most readers are at the newer end.
        for index in range(number + 1 - self.first, len(self._events)):
            found.append(self._events[index])
            size += len(found[-1])
            if size >= _PIECE:
                break
        return found

    async def news(self) -> None:
        """Return when an event was appended or the stream has ended."""
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()

    def drop_oldest(self, number: int) -> int:
        """Remove the event with this number if it is the oldest; for the store.

        Returns:
            Number of bytes that this frees; 0 if the event is not the oldest.
        """
        if number != self.first or not self._events:
            return 0
        self.first += 1
        return _size(number, self._events.popleft())

    def clear(self) -> int:
        """Remove all events, end the stream if it runs, and return the number of removed events; for the store."""
        count = len(self._events)
        self.first += count
        self._events.clear()
        self.end(NotFoundError("The stream was deleted while it was running."))
        return count

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


def _size(number: int, event: bytes) -> int:
    return len(event) + _EVENT_OVERHEAD + (_LOG_OVERHEAD if number == 1 else 0)


class _KeyEvents:
    """Events of one key's streams in the order of their arrival.

    Attributes:
        order: The stream and number of each event. Entries of removed events are skipped.
        num_events: Number of events that are kept.
    """

    def __init__(self) -> None:
        self.order: deque[tuple[StreamLog, int]] = deque()
        self.num_events = 0

    def forget_passed(self) -> None:
        """Remove outdated entries if they are the majority."""
        if len(self.order) > 2 * self.num_events + _SLACK:
            self.order = deque((log, number) for log, number in self.order if log.first <= number <= log.last)


class StreamStore:
    """Streams of one gateway process.

    Args:
        max_bytes: Maximum size of all events. One stream may have a sixteenth of it.
        grace: Seconds that a stream is kept without a reader.
    """

    def __init__(self, *, max_bytes: int, grace: float) -> None:
        self._max_bytes = max_bytes
        self._grace = grace
        self._logs: dict[str, StreamLog] = {}
        self._shares: dict[bytes, _KeyEvents] = {}
        self._bytes = Holdings()

    @property
    def num_bytes(self) -> int:
        """Bytes of all events."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._logs)

    def open(self, identifier: str, owner: bytes) -> StreamLog:
        """Create a log that `run` fills."""
        log = self._logs[identifier] = StreamLog(identifier, owner, self)
        return log

    def run(self, identifier: str, work: Coroutine[None, None, None]) -> None:
        """Run the coroutine that fills a log, until it ends or the stream is removed."""
        log = self._logs[identifier]
        log.task = asyncio.create_task(work)
        log.task.add_done_callback(lambda _: log.on_task_done())

    def find(self, identifier: str, owner: bytes) -> StreamLog:
        """Return a stream.

        Raises:
            NotFoundError: There is no such stream, or it belongs to another key.
        """
        log = self._logs.get(identifier)
        if log is None or log.owner != owner:
            raise NotFoundError(f"There is no stream with the id {shown_id(identifier)}.")
        return log

    @contextmanager
    def claim(self, identifier: str, log: StreamLog) -> Iterator[None]:
        """Keep the stream while the context is entered."""
        if log.timer is not None:
            log.timer.cancel()
            log.timer = None
        log.num_claims += 1
        try:
            yield
        finally:
            log.num_claims -= 1
            if log.num_claims == 0:
                if self._logs.get(identifier) is not log:
                    self._clear(log)
                elif log.ended and not log.last:
                    self.drop(identifier)  # the request was refused, and its client knows
                else:
                    log.timer = asyncio.get_running_loop().call_later(self._grace, self.drop, identifier)

    async def stop(self, identifier: str) -> None:
        """Stop the coroutine that fills a log and wait for it. Its events are kept."""
        if (log := self._logs.get(identifier)) is not None and log.task is not None:
            log.task.cancel()
            await asyncio.wait([log.task])

    async def retire(self, identifier: str) -> None:
        """Stop the coroutine that fills a log and remove the stream.

        Current readers receive all events including the end.
        """
        await self.stop(identifier)
        log = self._logs.get(identifier)
        if log is not None and log.num_claims:
            del self._logs[identifier]
        else:
            self.drop(identifier)

    def drop(self, identifier: str) -> None:
        """Remove a stream at once and stop the coroutine that fills it."""
        if (log := self._logs.pop(identifier, None)) is not None:
            if log.task is not None:
                log.task.cancel()
            if log.timer is not None:
                log.timer.cancel()
            self._clear(log)

    def _clear(self, log: StreamLog) -> None:
        self._free(log, log.num_bytes, log.clear())

    def on_append(self, log: StreamLog, size: int) -> None:
        """Count an event and make room for it; called by StreamLog."""
        log.num_bytes += size
        self._bytes.add(log.owner, size)
        share = self._shares.setdefault(log.owner, _KeyEvents())
        share.num_events += 1
        share.order.append((log, log.last))
        most = max(self._max_bytes // _STREAM_SHARE, size)
        while log.num_bytes > most + (_LOG_OVERHEAD if log.first == 1 else 0):
            self._drop_oldest(log, log.first)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(*self._shares[self._bytes.largest()].order.popleft())

    async def close(self) -> None:
        """Stop all running streams."""
        tasks = [log.task for log in self._logs.values() if log.task is not None]
        for identifier in list(self._logs):
            self.drop(identifier)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop_oldest(self, log: StreamLog, number: int) -> None:
        if size := log.drop_oldest(number):
            self._free(log, size, 1)
            if log.ended and not log.num_claims and log.last < log.first:
                self.drop(log.identifier)  # nothing is left that a client could resume

    def _free(self, log: StreamLog, size: int, num_events: int) -> None:
        if not num_events:
            return
        log.num_bytes -= size
        self._bytes.add(log.owner, -size)
        share = self._shares[log.owner]
        share.num_events -= num_events
        if share.num_events:
            share.forget_passed()
        else:
            del self._shares[log.owner]
