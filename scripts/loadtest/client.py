"""One streamed request: what is sent, how frames are timed, and when a stream counts as good."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import orjson

from scripts.loadtest.prompts import prompt_of
from scripts.loadtest.records import LoadRequest, Record, Target

_MAX_MESSAGE = 300


def request_body(target: Target, request: LoadRequest) -> bytes:
    """The JSON body of a request."""
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
    """Where the target's requests are posted."""
    return target.url + ("/chat/completions" if target.endpoint == "chat" else "/completions")


async def send(session: aiohttp.ClientSession, url: str, body: bytes, record: Record) -> None:
    """Posts a body and fills the record until the stream has ended, however it ends.

    Raises:
        asyncio.CancelledError: cancelled by the caller; the record says `interrupted`.
    """
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
        _fail(record, "timeout", "nothing arrived within the time limit")
    except aiohttp.ClientConnectorError as error:
        _fail(record, "connect", str(error))
    except (aiohttp.ClientError, ConnectionError) as error:
        # Before the status line the server refused or dropped the request; after it, the stream was cut.
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
        _fail(record, "bad_frame", f"the answer is {response.content_type}, not an event stream")
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
                    _fail(record, "truncated", "[DONE] came without a finish reason")
                return
            if not _take_frame(data, now, record):
                return
    if record.error is None:
        _fail(record, "truncated", "the stream ended without [DONE]")


def _take_frame(data: bytes, now: float, record: Record) -> bool:
    """Whether reading should go on."""
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
