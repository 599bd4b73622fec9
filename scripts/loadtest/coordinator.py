"""Coordinator of a load: starts client processes, dispatches each request at its time, and collects the records.

The coordinator decides order and concurrency; the processes only send. A request is released just before it is due, so
that the client builds its body, or, with a concurrency limit, when another request has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.loadtest.client_process import cpu_seconds
from scripts.loadtest.records import (
    MAX_LINE_BYTES,
    Cancel,
    Command,
    Cost,
    Finish,
    Go,
    LoadRequest,
    Ready,
    Record,
    Setup,
    Target,
    encode_line,
    event_decoder,
)

_ROOT = Path(__file__).resolve().parents[2]
_LEAD_SECONDS = 0.05  # time from the release of a request to its due time
_EXIT_SECONDS = 10.0


class ClientError(Exception):
    """Unexpected end of a client process."""


@dataclass
class LoadResult:
    """Records by index, and the cost of the load generator.

    `start` and `end` are monotonic seconds; `cpu_share` is the load generator's share of all CPUs.
    """

    records: list[Record] = field(default_factory=list)
    num_offered: int = 0
    start: float = 0.0
    end: float = 0.0
    cpu_share: float = 0.0
    interrupted: bool = False


class Load:
    """One load, which can be run once.

    Args:
        target: Server and options of the requests.
        requests: Requests in order of arrival.
        num_processes: Number of client processes.
        max_concurrency: Maximum number of requests in flight over all processes; None for no limit.
        duration: Seconds after which no more requests are sent; None to send all.
        on_record: Callback for each record.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[LoadRequest],
        *,
        num_processes: int,
        max_concurrency: int | None = None,
        duration: float | None = None,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._target = target
        self._requests = requests
        self._num_processes = max(1, min(num_processes, len(requests)))
        self._permits = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
        self._duration = duration
        self._on_record = on_record
        self._stopping = asyncio.Event()
        self._processes: list[_Process] = []
        self._outstanding: set[int] = set()
        self._changed = asyncio.Event()
        self._result = LoadResult(num_offered=len(requests))

    def interrupt(self) -> None:
        """Stop sending and cancel the requests in flight; `run` then returns the records so far."""
        self._result.interrupted = True
        self._stopping.set()
        for process in self._processes:
            process.send(Cancel())

    async def run(self) -> LoadResult:
        """Run the load.

        Raises:
            ClientError: A client process ended unexpectedly.
        """
        cpu_start = cpu_seconds()
        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(_Process.start(self._target)) for _ in range(self._num_processes)]
            self._processes = [task.result() for task in starts]
            await asyncio.gather(*(process.ready() for process in self._processes))
            self._result.start = time.monotonic() + 2 * _LEAD_SECONDS
            await self._send_and_collect()
        finally:
            for process in self._processes:
                await process.end()
        cost = cpu_seconds() - cpu_start + sum(process.cpu_seconds for process in self._processes)
        elapsed = max(1e-9, self._result.end - self._result.start)
        self._result.cpu_share = cost / elapsed / (os.cpu_count() or 1)
        self._result.records.sort(key=lambda record: record.index)
        return self._result

    async def _send_and_collect(self) -> None:
        readers = [asyncio.create_task(self._read(process)) for process in self._processes]
        dispatch = asyncio.create_task(self._dispatch())
        try:
            await asyncio.wait({dispatch, *readers}, return_when=asyncio.FIRST_COMPLETED)
            if not dispatch.done():
                raise ClientError("a client process ended unexpectedly")
            dispatch.result()
        finally:
            self._result.end = time.monotonic()
            dispatch.cancel()
            for process in self._processes:
                process.send(Finish())
            await asyncio.wait(readers, timeout=_EXIT_SECONDS)
            for reader in readers:
                reader.cancel()

    async def _dispatch(self) -> None:
        """Release all requests and wait until none is in flight."""
        for position, request in enumerate(self._requests):
            due = self._result.start + request.arrival
            if not await self._wait_until(due - _LEAD_SECONDS) or not await self._acquire():
                break
            self._outstanding.add(request.index)
            # A request delayed by the concurrency limit is due now, so that the delay is not charged to the client.
            late = self._permits is not None and time.monotonic() > due
            process = self._processes[position % len(self._processes)]
            process.send(Go(request, time.monotonic() if late else due))
        while self._outstanding:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_until(self, moment: float) -> bool:
        """Wait until a time; return False if the load stops before it."""
        if self._duration is not None and moment > self._result.start + self._duration:
            return False
        delay = moment - time.monotonic()
        if delay > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
        return not self._stopping.is_set()

    async def _acquire(self) -> bool:
        if self._permits is not None:
            limit = None if self._duration is None else self._result.start + self._duration - time.monotonic()
            try:
                await asyncio.wait_for(self._permits.acquire(), limit)
            except TimeoutError:
                return False
        return not self._stopping.is_set()

    async def _read(self, process: _Process) -> None:
        async for record in process.records():
            self._outstanding.discard(record.index)
            if self._permits is not None:
                self._permits.release()
            self._result.records.append(record)
            self._on_record(record)
            self._changed.set()


class _Process:
    """Client process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.cpu_seconds = 0.0

    @classmethod
    async def start(cls, target: Target) -> _Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "scripts.loadtest.client_process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            start_new_session=True,  # Ctrl-C must only reach the coordinator, which collects the records
        )  # fmt: skip
        self = cls(process)
        self.send(Setup(target))
        return self

    async def ready(self) -> None:
        """Wait until the process can send requests."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line or not isinstance(event_decoder.decode(line), Ready):
            raise ClientError("a client process did not start")

    def send(self, command: Command) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(encode_line(command))

    async def records(self) -> AsyncIterator[Record]:
        """Yield records until the process reports its cost or its output ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            event = event_decoder.decode(line)
            if isinstance(event, Cost):
                self.cpu_seconds = event.cpu_seconds
                return
            if isinstance(event, Record):
                yield event

    async def end(self) -> None:
        """Close the input and wait for the exit; kill the process after a time limit."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
