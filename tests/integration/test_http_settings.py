"""Effect of each gateway setting in a process started with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.flow.salt import Salts
from tests.fakes.fake_worker import LONG_CONTEXT, MANY_TOKENS, FakeWorker, Misbehaviour, endless
from tests.fakes.gateway_core import until
from tests.integration.test_http_process import Process, ready

COMPLETIONS = "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 50}


class Client:
    """Client of a gateway process."""

    def __init__(self, process: Process, session: aiohttp.ClientSession, url: str) -> None:
        self.process = process
        self.session = session
        self.url = url

    async def complete(self, headers: Mapping[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + COMPLETIONS, json={**BODY, **fields}, headers=headers) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def gateway(directory: Path, *args: str, **env: str) -> AsyncIterator[Client]:
    """Run a gateway process that has found its worker."""
    process = Process(directory, *args, **env)
    try:
        url = await process.url()
        async with aiohttp.ClientSession() as session:
            await ready(session, url)
            yield Client(process, session, url)
    finally:
        process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    return path


async def test_worker_endpoints_are_used_instead_of_the_directory(directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "e"
    elsewhere.mkdir(mode=0o700)
    with FakeWorker(directory, model_names=("scanned",)), FakeWorker(elsewhere, model_names=("named",)) as worker:
        async with gateway(directory, "--worker", worker.endpoint) as client:
            async with client.session.get(client.url + "/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["named"]


async def test_salts_follow_secret_key_and_sharing(directory: Path) -> None:
    keys = ("--api-key", "sk-one", "--api-key", "sk-two")
    with FakeWorker(directory) as worker:

        async def salts(*args: str) -> list[bytes]:
            begin = len(worker.submits())
            async with gateway(directory, *keys, *args, PELTON_CACHE_SECRET="s3cret") as client:
                for key in ("sk-one", "sk-two", "sk-one"):
                    status, _ = await client.complete({"Authorization": f"Bearer {key}"})
                    assert status == 200
            return [submit.salt for submit in worker.submits()[begin:]]

        one, two, again = await salts()
        assert one == again != two and one
        # The secret decides, not the process.
        assert await salts() == [one, two, one]
        assert await salts("--shared-prefix-cache") == [Salts(b"s3cret", shared=True).derive(b"any")] * 3


async def test_limits_of_size(directory: Path) -> None:
    with FakeWorker(directory):
        async with gateway(directory, "--max-body-size", "1000", "--max-header-size", "600") as client:
            assert (await client.complete())[0] == 200
            assert (await client.complete(prompt="a" * 1000))[0] == 413
            assert (await client.complete({"X-Long": "a" * 700}))[0] == 431


@pytest.mark.parametrize(
    ("args", "first", "words"),
    [
        (("--max-concurrent-requests", "1"), 1, "1 requests in flight"),
        (("--max-waiting-requests", "1"), 2, "limit is 2"),
        (("--max-waiting-tokens", "1"), 1, "limit of 1."),
    ],
)
async def test_limits_of_admission(directory: Path, args: tuple[str, ...], first: int, words: str) -> None:
    # No output ever arrives, so sent requests keep waiting.
    with FakeWorker(
        directory, max_num_seqs=1, script=endless, delay=0.01, faults=Misbehaviour(skip_sequence=10**9)
    ) as worker:
        async with gateway(directory, *args) as client:
            tasks = [asyncio.create_task(client.complete()) for _ in range(first)]
            await until(lambda: len(worker.submits()) == first)
            async with client.session.post(client.url + COMPLETIONS, json=BODY) as response:
                assert response.status == 429 and words in (await response.json())["error"]["message"]
                sequences = [response.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")]
            limit = 1 + int(dict([args]).get("--max-waiting-requests", 1024))
            assert sequences == [str(limit), str(limit - first)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_timeouts(directory: Path) -> None:
    with FakeWorker(directory, script=endless, delay=0.01, faults=Misbehaviour(skip_sequence=10**9)):
        args = ("--request-timeout", "1.5", "--body-timeout", "1", "--keepalive-interval", "0.1")
        async with gateway(directory, *args) as client:
            status, answer = await client.complete()
            assert (status, answer["error"]["code"]) == (503, "request_timeout")
            body = {**BODY, "stream": True}
            async with client.session.post(client.url + COMPLETIONS, json=body) as response:
                assert (await response.read()).startswith(b": keep-alive\n\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 100\r\n\r\n{")
            assert b" 408 " in await reader.readline()
            writer.close()


async def test_a_client_that_does_not_read_is_cut_off(directory: Path) -> None:
    with FakeWorker(directory, script=endless, **LONG_CONTEXT) as worker:
        async with gateway(directory, "--write-timeout", "0.5") as client:
            _, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]), limit=1024)
            raw = json.dumps({**BODY, "max_tokens": MANY_TOKENS, "n": 64, "stream": True, "ignore_eos": True}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            await until(lambda: worker.num_running)
            await until(lambda: not worker.num_running)
            writer.close()
            async with client.session.get(client.url + "/metrics") as response:
                assert 'pelton:request_success_total{finished_reason="length",model_name="fake"} 0.0' in (
                    await response.text()
                )


async def test_origins_of_browsers(directory: Path) -> None:
    args = ("--cors-origin", "https://one.example", "--cors-origin", "https://two.example")
    with FakeWorker(directory):
        async with gateway(directory, *args) as client:
            for origin, allowed in (("https://one.example", True), ("https://two.example", True), ("null", False)):
                async with client.session.get(client.url + "/health", headers={"Origin": origin}) as response:
                    assert response.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)


async def test_admin_keys_and_log_settings(directory: Path) -> None:
    args = ("--admin-api-key", "sk-admin", "--log-level", "debug", "--log-format", "json")
    with FakeWorker(directory):
        async with gateway(directory, *args) as client:
            assert (await client.complete())[0] == 401
            headers = {"Authorization": "Bearer sk-admin", "X-Request-Id": "my-own-id"}
            assert (await client.complete(headers))[0] == 200
            await client.process.end()
            lines = [json.loads(line) for line in client.process.log.read_text().splitlines()]
    # At level info the middle line is missing.
    assert [line["event"] for line in lines if line.get("request_id") == "my-own-id"] == ["submit", "request"]
    assert {line["component"] for line in lines} >= {"gateway", "gateway.http", "gateway.cluster"}
