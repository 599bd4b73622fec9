"""The gateway as its own process, over real ZeroMQ to a fake worker: start, readiness, drain, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import aiohttp
import openai
import orjson
import pytest

from shared.errors import EXIT_REFUSED
from shared.messages import Bundle
from tests.fakes.fake_worker import ENDLESS, MANY_TOKENS, FakeWorker
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import assembled, parse_events
from tests.fakes.prepared_server import GatewayProcess
from tests.fakes.processes import refusals, shared_port

MESSAGES = [{"role": "user", "content": "abc"}]
PATIENCE_SECONDS = 50.0
BROKEN = Bundle(bundle_hash="broken", tokenizer_json=b"{}")
REQUEST = {"model": "fake", "prompt": "a", "max_tokens": MANY_TOKENS}


@contextlib.contextmanager
def supervised(directory, *flags):
    """Run a gateway under a supervisor; yield it and a pipe, whose closing ends the supervisor."""
    reading, writing = os.pipe()
    with GatewayProcess(directory, *flags, pass_fds=(reading,), PELTON_SUPERVISOR_FD=str(reading)) as process:
        os.close(reading)
        with open(writing, "wb") as pipe:
            yield process, pipe


async def send(url, path, body):
    """Send a request on a connection of its own, which the server closes."""
    raw = orjson.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return reader, writer


async def test_start_serve_and_lose_the_worker(directory):
    with GatewayProcess(directory) as process:
        url = process.await_ready(503)
        with FakeWorker(directory):
            process.await_ready()
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
                whole = await client.completions.create(model="fake", prompt="hello", max_tokens=50)
                assert whole.choices[0].text == "hello" and whole.choices[0].finish_reason == "stop"
            async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
                metrics = await response.text()
            assert 'pelton:worker_ready{model_name="fake",worker="0"} 1.0' in metrics
            assert "_created" not in metrics
        process.await_ready(503)
        async with aiohttp.ClientSession() as session:
            body = {"model": "fake", "messages": MESSAGES}
            async with session.post(url + "/v1/chat/completions", json=body) as response:
                assert response.status == 503 and response.headers["Retry-After"]
        assert process.end() == 0


@pytest.mark.parametrize("version", [aiohttp.HttpVersion10, aiohttp.HttpVersion11], ids=str)
async def test_streams_of_several_choices_are_whole_in_either_version_of_http(directory, version):
    body = {"model": "fake", "messages": [{"role": "user", "content": "Grüße, 你好 🛑!"}], "max_tokens": 80, "n": 3}
    with FakeWorker(directory, delay=0.001), GatewayProcess(directory) as process:
        # The client asks to keep the connection, which a stream of HTTP/1.0 must close all the same.
        async with aiohttp.ClientSession(process.await_ready(), version=version) as session:
            async with session.post("/v1/chat/completions", json=body) as response:
                whole = (await response.json())["choices"]
            async with session.post("/v1/chat/completions", json={**body, "stream": True}) as response:
                *chunks, done = parse_events(await response.read())
            assert ("Transfer-Encoding" in response.headers) == (version == aiohttp.HttpVersion11)
    names = ("index", "message", "finish_reason")
    assert done == "[DONE]" and assembled(chunks) == [{name: one[name] for name in names} for one in whole]


async def test_a_second_sigterm_ends_the_drain(directory):
    with (
        FakeWorker(directory, delay=0.01, **ENDLESS),
        GatewayProcess(directory, "--drain-timeout", "170") as process,
    ):
        url, body = process.await_ready(), {**REQUEST, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            process.popen.terminate()
            process.await_ready(503)
            async with session.post(url + "/v1/completions", json=body) as refused:
                assert refused.status == 503 and refused.headers["Connection"] == "close"
            process.popen.terminate()
            *chunks, error, done = parse_events(first + await response.content.read())
        assert done == "[DONE]" and "shutting down" in error["error"]["message"] and chunks
        assert process.wait() == 0


async def test_a_disconnected_client_is_noticed_on_the_production_loop(directory):
    # 75: with uvloop, up to the Cancel that the worker receives.
    with (
        FakeWorker(directory, delay=0.01, **ENDLESS) as worker,
        GatewayProcess(directory) as process,
    ):
        url = process.await_ready()
        for number, stream in enumerate((False, True), 1):
            _, writer = await send(url, "/v1/completions", {**REQUEST, "stream": stream})
            await until(lambda: worker.num_running == 1)
            writer.close()
            await until(lambda: worker.num_running == 0)
            assert len(worker.cancels()) == number


REFUSED = [({"bundle": BROKEN}, "the tokenizer cannot be parsed"), ({"model_names": ()}, "its facts are invalid")]


@pytest.mark.parametrize(("worker", "words"), REFUSED)
def test_a_refused_model_ends_a_supervised_gateway(directory, worker, words):
    with supervised(directory) as (process, _), FakeWorker(directory, **worker):
        assert process.wait() == EXIT_REFUSED
        assert f"pelton gateway: the model cannot be served: {words}" in process.log()
        assert "Traceback" not in process.log()


async def test_a_standalone_gateway_waits_for_other_workers(directory):
    with GatewayProcess(directory) as process:
        for worker, words in REFUSED:
            with FakeWorker(directory, **worker):
                await until(lambda words=words: words in process.log())
                process.await_ready(503)
        with FakeWorker(directory, index=1):
            process.await_ready()
        assert process.end(signal.SIGINT) == 0


async def test_a_gateway_outlives_a_refused_worker_and_ends_with_its_supervisor(directory):
    with FakeWorker(directory), supervised(directory) as (process, pipe):
        process.await_ready()
        with FakeWorker(directory, index=1, bundle=BROKEN):
            await until(lambda: "bundle_not_usable" in process.log())
        process.await_ready()
        pipe.close()
        assert process.wait() == 0


def test_ready_and_watchdog_notifications(directory, tmp_path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(PATIENCE_SECONDS)
        with GatewayProcess(directory, NOTIFY_SOCKET=str(path), WATCHDOG_USEC="200000") as process:
            seen: set[str] = set()
            while not {"READY=1", "WATCHDOG=1"} <= seen:
                seen |= set(receiver.recv(4096).decode().split("\n"))
            process.popen.terminate()
            while "STOPPING=1" not in seen:
                seen |= set(receiver.recv(4096).decode().split("\n"))


def test_unusable_configuration(directory):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        cases = [
            (["--api-key-file", "/nonexistent"], "--api-key-file"),
            (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
            (["--no-such-flag"], "no-such-flag"),
            (["--api-key", "with space"], "API key"),
            (["--port", str(busy.getsockname()[1])], "is in use"),
            (["--gateway-processes", "2"], "--port 0 cannot be combined with --gateway-processes"),
            (["--gateway-processes", "2", "--gateway-index", "2", "--port", "1024"], "is 2; it must be below"),
        ]
        started = [["--port", "0", "--runtime-dir", str(directory), *arguments] for arguments, _ in cases]
        reasons = refusals("gateway", started)
    for reason, (_, words) in zip(reasons, cases, strict=True):
        assert words in reason and "with space" not in reason


async def test_keys_by_file_and_environment(directory, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# who\nsk-one name=alice\n\nsk-two name=root scope=admin\n")
    with GatewayProcess(directory, "--api-key-file", str(keys), PELTON_API_KEY="sk-three") as process:
        async with aiohttp.ClientSession(process.url) as session:
            for key, status in (("sk-one", 200), ("sk-two", 200), ("sk-three", 200), ("sk-four", 401)):
                async with session.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                    assert response.status == status
            # With keys any Host header is allowed.
            async with session.get("/health", headers={"Host": "pelton.example"}) as response:
                assert response.status == 200 and await response.json() == {"status": "ok"}
        assert process.end() == 0
        assert "sk-" not in process.log()


def test_two_gateways_of_one_index_do_not_share_a_port(directory):
    with shared_port() as port:
        flags = ("--gateway-processes", "2", "--port", str(port))
        with GatewayProcess(directory, *flags) as first:
            assert first.url
            with GatewayProcess(directory, *flags) as second:
                assert second.wait() == 1 and "Traceback" not in second.log()
                assert "a gateway with --gateway-index 0 is already running" in second.log()
