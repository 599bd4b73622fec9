"""Effect of each gateway setting in a process started with it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.flow.salt import Salts
from tests.fakes.fake_worker import LONG_CONTEXT, MANY_TOKENS, FakeWorker, endless
from tests.fakes.gateway_core import until
from tests.fakes.prepared_server import GatewayProcess

COMPLETIONS = "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 50}
MAX_SEQUENCES = 64
FLAGS = (
    *("--api-key", "sk-one", "--api-key", "sk-two", "--admin-api-key", "sk-admin"),
    *("--log-level", "debug", "--log-format", "json"),
    *("--max-body-size", "1000", "--max-header-size", "600"),
    *("--max-concurrent-requests", "2", "--max-waiting-requests", "1", "--max-waiting-tokens", "20"),
    *("--request-timeout", "1.5", "--body-timeout", "1", "--keepalive-interval", "0.1", "--write-timeout", "0.5"),
    *("--cors-origin", "https://one.example", "--cors-origin", "https://two.example"),
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, FakeWorker]]:
    directory = tmp_path_factory.mktemp("settings") / "r"
    directory.mkdir(mode=0o700)
    worker = FakeWorker(directory, max_num_seqs=MAX_SEQUENCES, **LONG_CONTEXT)
    with worker, GatewayProcess(directory, *FLAGS, PELTON_CACHE_SECRET="s3cret") as running:
        running.await_ready()
        yield running, worker


@pytest.fixture
def worker(process: tuple[GatewayProcess, FakeWorker]) -> FakeWorker:
    return process[1]


@pytest.fixture
async def session(process: tuple[GatewayProcess, FakeWorker]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(process[0].url, headers={"Authorization": "Bearer sk-one"}) as one:
        yield one
    await until(lambda: process[1].num_running == 0)


async def complete(session: aiohttp.ClientSession, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """Return the status and the body of a completion."""
    async with session.post(COMPLETIONS, json={**BODY, **fields}, headers=headers) as response:
        return response.status, await response.json()


def salts(worker: FakeWorker) -> list[bytes]:
    return [submit.salt for submit in worker.submits()]


async def test_the_secret_and_the_key_determine_the_salt(session, worker) -> None:
    for key in ("sk-one", "sk-two"):
        assert (await complete(session, {"Authorization": f"Bearer {key}"}))[0] == 200
        expected = Salts(b"s3cret", shared=False).derive(hashlib.sha256(key.encode()).digest())
        assert salts(worker)[-1] == expected


async def test_given_workers_replace_the_directory_and_keys_may_share_the_cache(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "re"]
    for directory in directories:
        directory.mkdir(mode=0o700)
    scanned, named = (FakeWorker(directory, model_names=(directory.name,)) for directory in directories)
    flags = ("--worker", named.endpoint, "--shared-prefix-cache", "--api-key", "sk-one")
    with scanned, named, GatewayProcess(directories[0], *flags) as process:
        headers = {"Authorization": "Bearer sk-one"}
        async with aiohttp.ClientSession(process.await_ready(), headers=headers) as session:
            async with session.get("/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["e"]
            assert (await complete(session, model="e"))[0] == 200
        assert salts(named) == [b""]


async def test_limits_of_size(session) -> None:
    assert (await complete(session))[0] == 200
    assert (await complete(session, prompt="a" * 1000))[0] == 413
    assert (await complete(session, {"X-Long": "a" * 700}))[0] == 431


async def test_limits_of_admission(session, worker) -> None:
    async def refusal(**fields: Any) -> tuple[str, str, str]:
        async with session.post(COMPLETIONS, json={**BODY, **fields}) as response:
            assert response.status == 429
            room = [response.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")]
            return (await response.json())["error"]["message"], *room

    worker.faults.stalled = True
    try:
        tasks = [asyncio.create_task(complete(session, n=MAX_SEQUENCES))]
        await until(lambda: worker.num_running == MAX_SEQUENCES)
        message, limit, remaining = await refusal(n=2)
        assert f"limit is {MAX_SEQUENCES + 1}" in message and (limit, remaining) == (str(MAX_SEQUENCES + 1), "1")
        assert "limit of 20." in (await refusal(prompt="word " * 30))[0]
        tasks.append(asyncio.create_task(complete(session)))
        await until(lambda: worker.num_running == MAX_SEQUENCES + 1)
        assert "2 requests in flight" in (await refusal())[0]
    finally:
        worker.faults.stalled = False
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_timeouts(process, session, worker) -> None:
    worker.faults.stalled = True
    try:
        status, answer = await complete(session)
        assert (status, answer["error"]["code"]) == (503, "request_timeout")
        async with session.post(COMPLETIONS, json={**BODY, "stream": True}) as response:
            assert (await response.read()).startswith(b": keep-alive\n\n")
    finally:
        worker.faults.stalled = False
    reader, writer = await asyncio.open_connection("127.0.0.1", int(process[0].url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    writer.write(b"Authorization: Bearer sk-one\r\nContent-Length: 100\r\n\r\n{")
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_origins_of_browsers(session) -> None:
    for origin, allowed in (("https://one.example", True), ("https://two.example", True), ("null", False)):
        async with session.get("/health", headers={"Origin": origin}) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)


async def test_admin_keys_and_log_settings(process, session) -> None:
    assert (await complete(session, {"Authorization": "Bearer sk-wrong"}))[0] == 401
    headers = {"Authorization": "Bearer sk-admin", "X-Request-Id": "my-own-id"}
    assert (await complete(session, headers))[0] == 200

    def events() -> list[str]:
        return [line["event"] for line in log_lines(process[0]) if line.get("request_id") == "my-own-id"]

    # At level info the first line is missing.
    await until(lambda: len(events()) == 2)
    assert events() == ["submit", "request"]
    assert {line["component"] for line in log_lines(process[0])} >= {"gateway", "gateway.http", "gateway.cluster"}


def log_lines(process: GatewayProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.log().splitlines()]


# The last test, since the worker's flood of tokens can cost it its connection.
async def test_a_client_that_does_not_read_is_disconnected(process, session, worker, monkeypatch) -> None:
    monkeypatch.setattr(worker, "script", endless)
    body = {**BODY, "max_tokens": MANY_TOKENS, "n": MAX_SEQUENCES, "stream": True, "ignore_eos": True}
    raw = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(process[0].url.rpartition(":")[2]), limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Authorization: Bearer sk-one\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    await until(lambda: worker.num_running)
    await until(lambda: not worker.num_running)
    writer.close()
    async with session.get("/metrics") as response:
        assert 'finished_reason="length",model_name="fake"} 0.0' in await response.text()
