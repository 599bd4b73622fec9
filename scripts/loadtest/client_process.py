"""Client process that sends streamed requests: it reads commands from stdin and writes events to stdout.

The body of a request is built when its command arrives, ahead of its time, so that a long prompt causes no delay.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from typing import Any

import aiohttp
import orjson

from scripts.loadtest.prompts import prompt_of
from scripts.loadtest.records import (
    MAX_LINE_BYTES,
    Cancel,
    Command,
    Cost,
    Event,
    Finish,
    Go,
    LoadRequest,
    Ready,
    Record,
    Setup,
    Target,
    command_decoder,
    encode_line,
)

_MAX_MESSAGE = 300


def request_body(target: Target, request: LoadRequest) -> bytes:
    """Return the JSON body of a request."""
    prompt = prompt_of(request, target.words, target.seed, target.prompt_overhead)
    body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    if target.endpoint == "chat":
        if not isinstance(prompt, str):
            raise ValueError("token ids can only be sent to the completions endpoint")
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if target.temperature is not None:
        body["temperature"] = target.temperature
    if target.ignore_eos:
        body["ignore_eos"] = True
    return orjson.dumps(body)


def endpoint_url(target: Target) -> str:
    """Return the URL of the target's endpoint."""
    return target.url + ("/chat/completions" if target.endpoint == "chat" else "/completions")


async def send(session: aiohttp.ClientSession, url: str, body: bytes, record: Record) -> None:
    """Post a body and fill the record until the stream ends. On cancellation its error is `interrupted`."""
    record.sent = time.monotonic()
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            record.status = response.status
            if response.status != 200:
                record.retry_after = response.headers.get("Retry-After")
                _fail(record, f"http_{response.status}", _error_message(await response.content.read(65536)))
            else:
                await _read_stream(response, record)
    except TimeoutError:
        _fail(record, "timeout", "no data arrived within the time limit")
    except aiohttp.ClientConnectorError as error:
        _fail(record, "connect", str(error))
    except (aiohttp.ClientError, ConnectionError) as error:
        # Before the status line the request was refused or dropped, after it the stream was cut off.
        _fail(record, "truncated" if record.status is not None else "connect", f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        _fail(record, "interrupted", "")
        raise
    finally:
        record.done = time.monotonic()
        if not record.tokens_from_usage:
            record.output_tokens = len(record.frame_times)


async def _read_stream(response: aiohttp.ClientResponse, record: Record) -> None:
    if not response.content_type.startswith("text/event-stream"):
        _fail(record, "bad_frame", f"the response is {response.content_type}, not an event stream")
        return
    rest = b""
    async for chunk in response.content.iter_any():
        now = time.monotonic()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):  # comments keep the connection alive; blank lines end events
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                if record.error is None and record.finish_reason is None:
                    _fail(record, "truncated", "[DONE] arrived without a finish reason")
                return
            if not _read_frame(data, now, record):
                return
    if record.error is None:
        _fail(record, "truncated", "the stream ended without [DONE]")


def _read_frame(data: bytes, now: float, record: Record) -> bool:
    """Add a frame to the record; return False if reading must stop."""
    try:
        frame = orjson.loads(data)
        if "error" in frame:
            _fail(record, "stream_error", _error_message(data))
            return True
        for choice in frame.get("choices") or ():
            if _has_text(choice):
                record.frame_times.append(now)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        usage = frame.get("usage")
        if usage:
            record.prompt_tokens = usage.get("prompt_tokens")
            record.output_tokens = usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            record.tokens_from_usage = True
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        _fail(record, "bad_frame", f"{type(error).__name__} in {data[:100].decode(errors='replace')}")
        return False
    return True


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _fail(record: Record, kind: str, message: str) -> None:
    if record.error is None:
        record.error = kind
        record.message = message[:_MAX_MESSAGE]


def _error_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return body.decode(errors="replace")


def cpu_seconds() -> float:
    """Return the CPU time of this process, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class ClientProcess:
    """Executor of the coordinator's commands, which reports each request exactly once."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self._target = target
        self._url = endpoint_url(target)
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, command: Command) -> None:
        """Execute one command; requests run as tasks."""
        match command:
            case Go(request, due):
                task = asyncio.create_task(self._run(request, due))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Cancel():
                for task in self._tasks:
                    task.cancel()
            case _:
                raise ValueError(f"unexpected command {type(command).__name__}")

    async def finish(self) -> None:
        """Wait for the requests in flight."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, request: LoadRequest, due: float) -> None:
        record = Record(index=request.index, due=due, sent=due, done=due, error=None)
        try:
            body = request_body(self._target, request)
            await asyncio.sleep(due - time.monotonic())
            await send(self._session, self._url, body, record)
        except asyncio.CancelledError:
            record.error = record.error or "interrupted"
        except Exception as error:  # noqa: BLE001 - without a record the coordinator would wait forever
            record.error, record.message = "client", f"{type(error).__name__}: {error}"
        _emit(record)


def _emit(event: Event) -> None:
    # Writes to the pipe block; the coordinator reads continuously, and most lines are under 64 KiB.
    view = memoryview(encode_line(event))
    while view:
        view = view[os.write(1, view) :]


async def main() -> None:
    """Run until the Finish command or the end of the input."""
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
        _emit(Ready())
        while line := await reader.readline():
            command = command_decoder.decode(line)
            if isinstance(command, Finish):
                break
            client.handle(command)
        else:
            client.handle(Cancel())  # the coordinator has exited
        await client.finish()
        _emit(Cost(cpu_seconds() - start))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
