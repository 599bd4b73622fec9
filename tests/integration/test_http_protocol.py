"""HTTP itself: malformed requests, sizes, timeouts, ids. Every answer is JSON and has a request id."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import run_gateway

JSON_HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"model":"fake-model","prompt":"x"}'


def parse(answer: bytes):
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def assert_error(answer: bytes, *statuses: int):
    status, headers, body = parse(answer)
    assert status in statuses, answer[:300]
    assert headers["content-type"].startswith("application/json") and headers["x-request-id"]
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


POST = b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/x.9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\nConnection: close\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: +5\r\n\r\nabcde",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        POST + b"Content-Length: -1\r\n\r\n",
    ],
)
async def test_malformed_requests(gateway, data):
    # CVE-2024-52304, CVE-2023-47627, CVE-2026-34525
    assert_error(await gateway.raw(data), 400)
    assert (await gateway.get("/health"))[0] == 200


@pytest.mark.parametrize("chunk", [b"0x10\r\n", b"+5\r\nabcde\r\n", b"-1\r\n", b"zz\r\n", b"5 \r\nabcde\r\n0\r\n\r\n"])
async def test_malformed_chunks(gateway, chunk):
    # CVE-2025-53643
    answer = await gateway.raw(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
    assert parse(answer)[0] == 400 and b"application/json" in answer
    assert not gateway.generator.requests


async def test_headers_too_large():
    # CVE-2025-48956, CVE-2026-54277. A client that sends more after the answer could lose it to a reset, so these stop.
    async with run_gateway(max_header_size=8192) as gateway:
        assert_error(
            await gateway.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 12_000 + b"\r\n\r\n"), 400, 431
        )
        assert_error(await gateway.raw(b"GET /" + b"a" * 12_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"), 400, 431)
        many = b"".join(b"X-%d: a\r\n" % number for number in range(300))
        assert_error(await gateway.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n"), 400, 431)
        # The same line in small segments.
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        for _ in range(1025):
            writer.write(b"a" * 8)
            await asyncio.sleep(0)
        async with asyncio.timeout(40):
            assert_error(await reader.read(), 400, 431)
        writer.close()


async def test_headers_that_never_end():
    # CVE-2025-48956
    async with run_gateway(header_timeout=0.2) as gateway:
        assert_error(await gateway.raw(b"GET /health HTTP/1.1\r\nHo"), 408)
    # The header timer does not affect a request that is being served.
    async with run_gateway(header_timeout=1.0) as gateway:
        raw = POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw[:20])
        await asyncio.sleep(0.05)
        writer.write(raw[20:])
        await asyncio.sleep(1.2)
        writer.write(BODY)
        async with asyncio.timeout(40):
            assert parse(await reader.read())[0] == 200
        writer.close()


async def test_body_that_never_ends():
    async with run_gateway(body_timeout=0.2) as gateway:
        answer = await gateway.raw(POST + b"Content-Length: 100\r\n\r\n{")
        status, headers, body = parse(answer)
        assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"
        assert headers["connection"] == "close"


async def test_body_too_large():
    async with run_gateway(max_body_size=1000) as gateway:
        status, body, headers = await gateway.complete(prompt="x" * 2000)
        assert status == 413 and body["error"]["code"] == "request_too_large" and "1000" in body["error"]["message"]
        assert headers["x-request-id"]
        # Without a declared length, the size is detected while reading.
        chunks = b"".join(b"64\r\n" + b"a" * 100 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
        raw = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        assert parse(await gateway.raw(raw))[0] == 413


async def test_many_tiny_chunks(gateway):
    # CVE-2025-69229: 100 000 chunks of one byte; a quadratic reader would time out.
    body = b'{"model":"fake-model","prompt":"x"' + b" " * 100_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = await gateway.raw(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert parse(answer)[0] == 200


async def test_pipelined_requests_are_all_answered(gateway):
    # CVE-2026-54273
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await gateway.raw(request * 999 + last)
    assert answer.count(b"HTTP/1.1 200") == 1000


async def test_unknown_routes_and_methods(gateway):
    status, raw, headers = await gateway.get("/nope")
    assert status == 404 and json.loads(raw)["error"]["code"] == "not_found" and headers["x-request-id"]
    for path, shown in (
        ("/chat/completions", "/chat/completions"),
        ("/v1/%22%0A%C3%A4?x=y", '/v1/"\nä'),
        ("/v1/messages/" + "a" * 5000, "/v1/messages/" + "a" * 187),
    ):
        _, raw, _ = await gateway.get(path)
        assert json.loads(raw)["error"]["message"] == f"There is no route GET {shown}."
    for method, path, allowed in (
        ("DELETE", "/v1/models", "GET,HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/tokenize", "POST"),
        ("OPTIONS", "/v1/completions", "POST"),
    ):
        async with gateway.session.request(method, gateway.url + path) as response:
            assert response.status == 405 and response.headers["Allow"] == allowed
            error = (await response.json())["error"]
            shown = " and ".join(allowed.split(","))
            assert error["message"] == f"This route supports {shown}, not {method}."
            assert error["code"] == "method_not_allowed"


async def test_unknown_expectation(gateway):
    raw = POST + b"Expect: miracles\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    status, headers, body = parse(await gateway.raw(raw))
    assert status == 417 and json.loads(body)["error"]["code"] == "expectation_failed" and headers["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        ({"X-Request-Id": "abc-123"}, "abc-123"),
        ({"X-Client-Request-Id": "c", "X-Request-Id": "r"}, "c"),
        ({"X-Request-Id": "x" * 128}, "x" * 128),
        ({"X-Request-Id": "x" * 129}, None),
        ({"X-Request-Id": "a b"}, None),
        ({"X-Request-Id": "\u00e9"}, None),
        ({"X-Request-Id": ""}, None),
    ],
)
async def test_request_ids(gateway, headers, kept):
    for path in ("/health", "/nope", "/v1/models"):
        _, _, answer = await gateway.get(path, **headers)
        assert answer["x-request-id"] == kept if kept else answer["x-request-id"].startswith("req_")


async def test_ops(gateway):
    assert (await gateway.get("/health"))[:2] == (200, b'{"status":"ok"}')
    assert (await gateway.get("/ready"))[0] == 200
    gateway.models.is_ready = False
    status, raw, headers = await gateway.get("/ready")
    assert status == 503 and json.loads(raw)["error"]["code"] == "not_ready" and headers["Retry-After"]
    assert (await gateway.get("/health"))[0] == 200
    status, raw, headers = await gateway.get("/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b'pelton:http_requests_total{route="/ready",status="503"} 1.0' in raw


async def test_head_requests_have_no_body(gateway):
    async with gateway.session.head(gateway.url + "/v1/models") as response:
        assert response.status == 200 and await response.read() == b""


async def test_a_connection_dropped_in_the_body_is_not_a_server_error(gateway):
    # CVE-2026-54280
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(POST + b"Content-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
    assert (await gateway.complete())[0] == 200
    await until(lambda: gateway.drain.num_in_flight == 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_this_file_with_the_python_parser_of_aiohttp():
    # CVE-2025-53643: aiohttp uses this parser if its compiled one is missing.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "AIOHTTP_NO_EXTENSIONS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
