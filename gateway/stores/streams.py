"""Events of streams that outlive their connections: they are kept for a while, so that a client may come back for them.

A stream runs in a task of its own and writes to its log; every connection only reads. Whoever reads claims the stream;
one that nobody has claimed for the grace period is cancelled, if it still runs, and forgotten.

Where room is needed, the key that has most of it loses its oldest events: who streams little loses nothing to one who
streams much.
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
"""Bytes that an event takes beside its own, about."""
_LOG_OVERHEAD = 1536
"""Bytes that a stream takes beside its events, about; counted with its first event."""
_STREAM_SHARE = 16
"""One stream may take this part of all room."""
_SLACK = 1024
_PIECE = 65_536
"""Bytes of events that a reader takes at a time: what a client does not read waits in its connection's buffer, and
thousands may read a long stream."""


class StreamLog:
    """The events of one stream, numbered from 1, of which the oldest may be gone.

    Attributes:
        owner: hash of the key whose stream it is.
        ended: no event will follow.
        first: the number of the oldest event that is kept.
    """

    __slots__ = (
        "_error",
        "_events",
        "_news",
        "_store",
        "ended",
        "first",
        "identifier",
        "num_bytes",
        "num_claims",
        "owner",
        "timer",
    )

    def __init__(self, identifier: str, owner: bytes, store: StreamStore) -> None:
        self.identifier = identifier
        self.owner = owner
        self.ended = False
        self._error: PeltonError | None = None
        self.num_bytes = 0
        # For the store.
        self.num_claims = 0
        self.timer: asyncio.TimerHandle | None = None
        self._store = store
        self._events: deque[bytes] = deque()
        self.first = 1
        self._news: asyncio.Event | None = None

    @property
    def error(self) -> PeltonError | None:
        """Why it ended before its last event, where it did. A new one for each who asks."""
        return None if self._error is None else self._error.untouched()

    @property
    def last(self) -> int:
        """The number of the last event; 0: there was none."""
        return self.first + len(self._events) - 1

    def append(self, event: bytes) -> None:
        """The next event, framed. Nothing where it has ended: it was deleted while it ran."""
        if self.ended:
            return
        self._events.append(event)
        self._store.on_append(self, _size(self.last, event))
        self._wake()

    def end(self, error: PeltonError | None = None) -> None:
        """Nothing follows. `error` is for a stream whose events do not say how it ended. The first end counts."""
        if self.ended:
            return
        self.ended = True
        self._error = None if error is None else error.untouched()
        self._wake()

    def after(self, number: int) -> Sequence[bytes]:
        """The events behind that of this number, as many as are sent at a time. Raises NotFoundError where the next
        is not kept any more: trying again, as clients do after a 503, would not bring it back.
        """
        if number + 1 < self.first:
            raise NotFoundError("The stream has gone on too far: what follows is not kept.", code="stream_expired")
        found: list[bytes] = []
        size = 0
        # By index: it takes a deque no time at its ends, and most read at the newer one.
        for index in range(number + 1 - self.first, len(self._events)):
            found.append(self._events[index])
            size += len(found[-1])
            if size >= _PIECE:
                break
        return found

    async def news(self) -> None:
        """Returns when something was appended, or the stream has ended."""
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()

    def has(self, number: int) -> bool:
        """Whether the event is kept."""
        return self.first <= number <= self.last

    def drop_oldest(self, number: int) -> int:
        """Forgets the event of this number, if it is the oldest; returns how many bytes that frees. For the store."""
        if number != self.first or not self._events:
            return 0
        self.first += 1
        return _size(number, self._events.popleft())

    def clear(self) -> int:
        """Forgets all, and ends where it has not; returns how many events there were. For the store."""
        count = len(self._events)
        self.first += count
        self._events.clear()
        self.end(NotFoundError("The stream was deleted while it ran."))
        return count

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


def _size(number: int, event: bytes) -> int:
    return len(event) + _EVENT_OVERHEAD + (_LOG_OVERHEAD if number == 1 else 0)


class _Share:
    """The events of one key's streams, in the order in which they came.

    Attributes:
        order: each by its number; those that are gone already are passed over.
        num_events: that are kept.
    """

    __slots__ = ("num_events", "order")

    def __init__(self) -> None:
        self.order: deque[tuple[StreamLog, int]] = deque()
        self.num_events = 0

    def forget_passed(self) -> None:
        """Drops what is passed over, where that is most."""
        if len(self.order) > 2 * self.num_events + _SLACK:
            self.order = deque((log, number) for log, number in self.order if log.has(number))


class StreamStore:
    """The streams of one gateway process.

    Args:
        max_bytes: of all events. One stream may have a sixteenth of it.
        grace: seconds that a stream is kept without a reader.
    """

    def __init__(self, *, max_bytes: int, grace: float) -> None:
        self._max_bytes = max_bytes
        self._grace = grace
        self._logs: dict[str, StreamLog] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shares: dict[bytes, _Share] = {}
        self._bytes = Holdings()

    @property
    def num_bytes(self) -> int:
        """Of all events."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._logs)

    def open(self, identifier: str, owner: bytes) -> StreamLog:
        """A new log, which `run` fills."""
        log = self._logs[identifier] = StreamLog(identifier, owner, self)
        return log

    def run(self, identifier: str, work: Coroutine[None, None, None]) -> None:
        """Runs what fills a log, until it ends or nobody wants it."""
        task = self._tasks[identifier] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._on_done(identifier))

    def find(self, identifier: str, owner: bytes) -> StreamLog:
        """Raises NotFoundError, also for a stream of another key."""
        log = self._logs.get(identifier)
        if log is None or log.owner != owner:
            raise NotFoundError(f"There is no stream with the id {shown_id(identifier)}.")
        return log

    @contextmanager
    def claim(self, identifier: str, log: StreamLog) -> Iterator[None]:
        """While it is held, the stream is kept."""
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
                    self.drop(identifier)  # it was refused, and whoever asked for it knows
                else:
                    log.timer = asyncio.get_running_loop().call_later(self._grace, self.drop, identifier)

    async def stop(self, identifier: str) -> None:
        """Ends what fills a log, and waits for that; what it has written is kept."""
        if (task := self._tasks.get(identifier)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def retire(self, identifier: str) -> None:
        """Ends what fills a log, and forgets it; whoever reads it is sent all that it has, its end too."""
        await self.stop(identifier)
        log = self._logs.get(identifier)
        if log is not None and log.num_claims:
            del self._logs[identifier]
        else:
            self.drop(identifier)

    def drop(self, identifier: str) -> None:
        """Forgets a stream at once, and ends what fills it."""
        if (task := self._tasks.pop(identifier, None)) is not None:
            task.cancel()
        if (log := self._logs.pop(identifier, None)) is not None:
            if log.timer is not None:
                log.timer.cancel()
            self._clear(log)

    def _clear(self, log: StreamLog) -> None:
        self._free(log, log.num_bytes, log.clear())

    def on_append(self, log: StreamLog, size: int) -> None:
        """Counts an event, and makes room for it. For StreamLog."""
        log.num_bytes += size
        self._bytes.add(log.owner, size)
        share = self._shares.setdefault(log.owner, _Share())
        share.num_events += 1
        share.order.append((log, log.last))
        most = max(self._max_bytes // _STREAM_SHARE, size)
        while log.num_bytes > most + (_LOG_OVERHEAD if log.first == 1 else 0):
            self._drop_oldest(log, log.first)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(*self._shares[self._bytes.largest()].order.popleft())

    async def close(self) -> None:
        """Ends all that runs."""
        tasks = list(self._tasks.values())
        for identifier in list(self._logs):
            self.drop(identifier)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, identifier: str) -> None:
        self._tasks.pop(identifier, None)
        if (log := self._logs.get(identifier)) is not None:
            log.end()  # one that was cancelled before it began has not

    def _drop_oldest(self, log: StreamLog, number: int) -> None:
        if size := log.drop_oldest(number):
            self._free(log, size, 1)
            if log.ended and not log.num_claims and log.last < log.first:
                self.drop(log.identifier)  # nothing is left that a client could come back for

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
