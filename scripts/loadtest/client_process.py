"""A client process: takes commands on stdin, writes events on stdout.

Bodies are built when a request is announced, ahead of its time, so that writing a long prompt delays nothing.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

import aiohttp

from scripts.loadtest.client import endpoint_url, request_body, send
from scripts.loadtest.records import (
    MAX_LINE_BYTES,
    Cancel,
    Command,
    Cost,
    Event,
    Finish,
    Go,
    Prepare,
    Ready,
    Record,
    Setup,
    Sync,
    Target,
    command_decoder,
    encode_line,
)


def cpu_seconds() -> float:
    """Processor time of this process so far, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class ClientProcess:
    """Sends what the coordinator orders and reports each request once."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self._target = target
        self._url = endpoint_url(target)
        self._session = session
        self._bodies: dict[int, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, command: Command) -> None:
        """Carries out one command; requests run as tasks."""
        match command:
            case Prepare(request):
                self._bodies[request.index] = request_body(self._target, request)
            case Go(index, due):
                task = asyncio.create_task(self._run(index, due))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Sync():
                _emit(Ready())
            case Cancel():
                for task in self._tasks:
                    task.cancel()
            case _:
                raise ValueError(f"unexpected command {type(command).__name__}")

    async def finish(self) -> None:
        """Waits for what is still in flight."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, due: float) -> None:
        record = Record(index=index, due=due, sent=due, done=due, error=None)
        try:
            await asyncio.sleep(due - time.monotonic())
            await send(self._session, self._url, self._bodies.pop(index), record)
        except asyncio.CancelledError:
            record.error = record.error or "interrupted"
        except Exception as error:  # noqa: BLE001 - a record must come back, or the coordinator waits for ever
            record.error, record.message = "client", f"{type(error).__name__}: {error}"
        _emit(record)


def _emit(event: Event) -> None:
    # A pipe of blocking writes: the coordinator reads all the time, and a line is mostly under 64 KiB.
    view = memoryview(encode_line(event))
    while view:
        view = view[os.write(1, view) :]


async def main() -> None:
    """Runs until the coordinator says so or its end of the pipe closes."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = command_decoder.decode(await reader.readline())
    if not isinstance(setup, Setup):
        raise TypeError("the first command must be the setup")
    target = setup.target
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=target.timeout, sock_read=target.timeout)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        client = ClientProcess(target, session)
        start = cpu_seconds()
        while line := await reader.readline():
            command = command_decoder.decode(line)
            if isinstance(command, Finish):
                break
            client.handle(command)
        else:
            client.handle(Cancel())  # the coordinator is gone
        await client.finish()
        _emit(Cost(cpu_seconds() - start))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
