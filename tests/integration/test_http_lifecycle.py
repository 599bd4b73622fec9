"""Clients that disconnect or do not read, server shutdown, and the official SDK. Numbers are collected bug reports."""

from __future__ import annotations

import asyncio
import json

import pytest
import structlog

from gateway import server
from gateway.flow.events import TextDelta
from tests.fakes.fake_generator import MODEL, FakeGenerator, spell
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import run_gateway

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
REQUESTS = [
    ("/v1/chat/completions", {**BODY}),
    ("/v1/chat/completions", {**BODY, "stream": True}),
    ("/v1/completions", {"model": MODEL, "prompt": "x"}),
    ("/v1/completions", {"model": MODEL, "prompt": ["x", "y", "z"], "stream": True}),
    ("/v1/completions", {"model": MODEL, "prompt": ["x", "y", "z"], "n": 2}),
]


async def send(gateway, path, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    return reader, writer


@pytest.mark.parametrize("leave", ["FIN", "RST"])
@pytest.mark.parametrize("steps", [[60.0], [TextDelta(0, "Hel", [1]), 60.0]], ids=["waiting", "running"])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_disconnect_cancels_the_generations(gateway, path, body, steps, leave):
    # 70, 75, 78
    gateway.generator.script = lambda _: list(steps)
    _, writer = await send(gateway, path, body)
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    await until(lambda: len(gateway.generator.live) == num_prompts)
    await asyncio.sleep(0.02)
    if leave == "FIN":
        writer.close()
    else:
        writer.transport.abort()
    await until(lambda: not gateway.generator.live and not gateway.drain.num_in_flight)
    assert all(generation.cancelled for generation in gateway.generator.generations)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_is_logged(stream):
    with structlog.testing.capture_logs() as lines:
        async with run_gateway(FakeGenerator(lambda _: [TextDelta(0, "Hel", [1]), 60.0])) as gateway:
            _, writer = await send(gateway, "/v1/chat/completions", {**BODY, "stream": stream})
            await until(lambda: gateway.generator.live)
            writer.close()
            await until(lambda: not gateway.drain.num_in_flight)
    (line,) = (line for line in lines if line.get("route") == "/v1/chat/completions")
    assert (line["event"], line["method"]) == ("connection_lost", "POST") and line["seconds"] >= 0
    assert line["log_level"] == "info"


async def test_a_client_that_does_not_read_its_whole_response_is_cut_off():
    # F9: a one-piece response is written outside of any route; pipelined responses come in order.
    generator = FakeGenerator(lambda _: [TextDelta(0, "x" * 3_000_000, [1], finish_reason="stop")])
    async with run_gateway(generator, write_timeout=0.2) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        raw = json.dumps(BODY).encode()
        head = f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        writer.write((b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + head + raw) * 20)
        await until(lambda: generator.generations)
        # Reset or broken pipe: unsent data is dropped.
        with pytest.raises(ConnectionError):
            while True:
                await asyncio.sleep(0.02)
                if writer.transport.is_closing():
                    await reader.read()
                writer.write(b"\r\n")
                await writer.drain()
        del reader


async def test_a_client_that_reads_slowly_gets_all():
    text = "x" * 4_000_000
    generator = FakeGenerator(lambda _: [TextDelta(0, text, [1], finish_reason="stop")])
    # The whole response takes longer than the write timeout, and each read a twentieth of it.
    async with run_gateway(generator, write_timeout=1.0) as gateway:
        reader, writer = await send(gateway, "/v1/chat/completions", BODY)
        received = b""
        while text[-1000:].encode() + b'"' not in received[-2000:]:
            await asyncio.sleep(0.05)
            received += await reader.read(100_000)
        writer.close()


async def test_too_many_connections():
    # F22: file descriptors must remain for the workers.
    async with run_gateway(max_connections=3) as gateway:
        idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]
        answer = await gateway.raw(b"")
        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in answer and b"x-request-id" in answer
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "service_unavailable"
        idle.pop()[1].close()
        async with asyncio.timeout(40):
            while not (answer := await gateway.raw(b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 200 "):
                assert answer.startswith(b"HTTP/1.1 503 "), "the closed connection still counts"
        for _, writer in idle:
            writer.close()


async def test_a_silent_connection_is_closed(monkeypatch):
    # F11
    monkeypatch.setattr(server, "KEEPALIVE_SECONDS", 0.2)
    async with run_gateway() as gateway:
        assert await gateway.raw(b"") == b""


async def test_too_many_requests_in_flight():
    async with run_gateway(FakeGenerator(lambda _: [60.0]), max_requests=2) as gateway:
        writers = [(await send(gateway, "/v1/chat/completions", BODY))[1] for _ in range(2)]
        await until(lambda: len(gateway.generator.live) == 2)
        status, body, headers = await gateway.chat()
        assert status == 429 and body["error"]["code"] == "rate_limit_exceeded" and headers["Retry-After"]
        # Probes are exempt.
        assert (await gateway.get("/ready"))[0] == 200
        for writer in writers:
            writer.close()
        await until(lambda: not gateway.drain.num_in_flight)
        gateway.generator.script = spell("ok")
        assert (await gateway.chat())[0] == 200


async def test_drain_lets_requests_finish(gateway):
    gate = asyncio.Event()
    script = [TextDelta(0, "a", [1]), gate, *spell("b")()]
    gateway.generator.script = lambda _: list(script)
    streaming = asyncio.create_task(gateway.stream_chat())
    whole = asyncio.create_task(gateway.chat())
    await until(lambda: len(gateway.generator.live) == 2)
    gateway.drain.begin()
    waiting = asyncio.create_task(gateway.drain.wait(50))
    status, _, headers = await gateway.get("/ready")
    assert status == 503 and headers["Retry-After"]
    status, body, headers = await gateway.chat()
    assert status == 503 and headers["Connection"] == "close" and "shutting down" in body["error"]["message"]
    assert (await gateway.get("/health"))[0] == 200
    gate.set()
    assert await waiting
    assert (await whole)[1]["choices"][0]["message"]["content"] == "ab"
    events = await streaming
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("hurried", [False, True])
async def test_drain_ends_running_requests_with_errors(gateway, hurried):
    num_begun = 0

    def script(_):
        nonlocal num_begun
        yield TextDelta(0, "a", [1])
        num_begun += 1
        yield asyncio.Event()

    gateway.generator.script = script
    streams = [
        asyncio.create_task(gateway.stream_chat()),
        asyncio.create_task(gateway.stream_complete(prompt=["x", "y"])),
    ]
    whole = asyncio.create_task(gateway.chat())
    await until(lambda: num_begun == 4)
    gateway.drain.begin()
    if hurried:
        waiting = asyncio.create_task(gateway.drain.wait(60))
        await asyncio.sleep(0.01)
        gateway.drain.hurry()
        assert not await waiting
    else:
        assert not await gateway.drain.wait(0.05)
    status, body, _ = await whole
    assert status == 503 and "shutting down" in body["error"]["message"]
    for stream in streams:
        *chunks, error, done = await stream
        assert done == "[DONE]" and "shutting down" in error["error"]["message"]
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert not gateway.generator.live
