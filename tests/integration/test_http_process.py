"""The gateway as its own process, over real ZeroMQ to a fake worker: start, readiness, drain, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import openai
import orjson
import pytest

from shared.errors import EXIT_REFUSED
from shared.messages import Bundle
from tests.fakes.fake_worker import LONG_CONTEXT, MANY_TOKENS, FakeWorker, endless
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import parse_events
from tests.fakes.processes import listening_url, shared_port

MESSAGES = [{"role": "user", "content": "abc"}]
PATIENCE_SECONDS = 50.0


class Process:
    """`python -m gateway` on a free port."""

    def __init__(
        self, directory: Path, *args: str, pass_fds: tuple[int, ...] = (), log: str = "gateway.log", **env: str
    ) -> None:
        self.log = directory.parent / log
        environment = {**os.environ, **env}
        with self.log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "gateway", "--port", "0", "--runtime-dir", str(directory), *args],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=pass_fds,
            )

    async def url(self) -> str:
        """Return the URL once the gateway listens."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (url := listening_url(self.log.read_text())) is None:
                assert self.popen.poll() is None, self.log.read_text()
                await asyncio.sleep(0.025)
        return url

    async def says(self, words: str) -> None:
        """Wait until the log contains the words."""
        await until(lambda: words in self.log.read_text())

    async def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return await asyncio.to_thread(self.popen.wait, PATIENCE_SECONDS)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    return path


@contextlib.asynccontextmanager
async def running(directory, *args, **env):
    process = Process(directory, *args, **env)
    try:
        yield process, await process.url()
    finally:
        process.kill()


async def ready(session, url, status=200):
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            async with session.get(url + "/ready") as response:
                if response.status == status:
                    return
            await asyncio.sleep(0.05)


async def test_start_serve_and_lose_the_worker(directory):
    async with running(directory) as (process, url), aiohttp.ClientSession() as session:
        async with session.get(url + "/ready") as response:
            assert response.status == 503 and (await response.json())["error"]["code"] == "not_ready"
        with FakeWorker(directory):
            await ready(session, url)
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
                whole = await client.completions.create(model="fake", prompt="hello", max_tokens=50)
                stream = await client.completions.create(model="fake", prompt="hello", max_tokens=50, stream=True)
                text = "".join([chunk.choices[0].text async for chunk in stream])
                assert whole.choices[0].text == text == "hello" and whole.choices[0].finish_reason == "stop"
                chat = await client.chat.completions.create(model="fake", messages=MESSAGES)
                assert "abc" in (chat.choices[0].message.content or "")
            async with session.get(url + "/metrics") as response:
                metrics = await response.text()
            assert 'pelton:worker_ready{model_name="fake",worker="0"} 1.0' in metrics
            assert "_created" not in metrics
        await ready(session, url, 503)
        async with session.post(url + "/v1/chat/completions", json={"model": "fake", "messages": MESSAGES}) as response:
            assert response.status == 503 and response.headers["Retry-After"]
        assert await process.end() == 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streams_of_several_choices_are_whole_in_either_version_of_http(directory, version, path):
    prompt = {"prompt": "Grüße, 你好 🛑!"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {"model": "fake", "max_tokens": 80, "n": 3, **prompt}
    with FakeWorker(directory, delay=0.001):
        async with running(directory) as (_, url), aiohttp.ClientSession() as session:
            await ready(session, url)
            async with session.post(url + path, json=body) as response:
                whole = await response.json()
            raw = orjson.dumps({**body, "stream": True})
            head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
            headers, _, data = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    assert (b"Transfer-Encoding: chunked" in headers) == (version == "1.1")
    *chunks, done = parse_events(unchunked(data) if version == "1.1" else data)
    assert done == "[DONE]"
    for expected in whole["choices"]:
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in mine]
        assert "".join(texts) == (expected["text"] if "text" in expected else expected["message"]["content"])
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [expected["finish_reason"]]


def unchunked(data):
    """Return the body of a chunked HTTP/1.1 response."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        assert data[count : count + 2] == b"\r\n"
        if count == 0:
            assert data == b"\r\n"
            return body
        body, data = body + data[:count], data[count + 2 :]


@pytest.mark.parametrize(("timeout", "hurried"), [("0.2", False), ("170", True)])
async def test_sigterm_drains_and_exits_with_0(directory, timeout, hurried):
    # An endless answer: the drain's timeout or a second signal ends the stream with an error event.
    flags = ("--drain-timeout", timeout)
    with FakeWorker(directory, delay=0.01, script=endless, **LONG_CONTEXT):
        async with running(directory, *flags) as (process, url), aiohttp.ClientSession() as session:
            await ready(session, url)
            body = {"model": "fake", "prompt": "a", "max_tokens": MANY_TOKENS, "stream": True}
            async with session.post(url + "/v1/completions", json=body) as response:
                first = await response.content.readuntil(b"\n\n")
                ending = asyncio.create_task(process.end())
                if hurried:
                    await ready(session, url, 503)
                    async with session.post(url + "/v1/completions", json=body) as refused:
                        assert refused.status == 503 and refused.headers["Connection"] == "close"
                    process.popen.terminate()
                *chunks, error, done = parse_events(first + await response.content.read())
            assert done == "[DONE]" and "shutting down" in error["error"]["message"] and chunks
            assert await ending == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed_on_the_production_loop(directory, stream):
    # 75: with uvloop, up to the Cancel that the worker receives.
    with FakeWorker(directory, delay=0.01, script=endless, **LONG_CONTEXT) as worker:
        async with running(directory) as (process, url), aiohttp.ClientSession() as session:
            await ready(session, url)
            raw = json.dumps({"model": "fake", "prompt": "a", "max_tokens": MANY_TOKENS, "stream": stream}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            await until(lambda: worker.num_running == 1)
            writer.close()
            await until(lambda: worker.num_running == 0)
            assert len(worker.cancels()) == 1
            assert await process.end() == 0


async def test_sigterm_when_idle_ends_at_once(directory):
    async with running(directory, "--drain-timeout", "60") as (process, _):
        assert await process.end(signal.SIGINT) == 0


async def test_the_end_of_the_supervisor_ends_the_gateway(directory):
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    process = Process(directory, pass_fds=(reading,), PELTON_SUPERVISOR_FD=str(reading))
    try:
        os.close(reading)
        await process.url()
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.popen.wait, 0.5)
        os.close(writing)
        assert await asyncio.to_thread(process.popen.wait, PATIENCE_SECONDS) == 0
    finally:
        process.kill()


REFUSED = [
    ({"bundle": Bundle(bundle_hash="broken", tokenizer_json=b"{}")}, "the tokenizer cannot be parsed"),
    ({"tool_call_parser": "nonsense"}, "--tool-call-parser is 'nonsense'"),
    ({"model_names": ()}, "its facts are invalid"),
]


@pytest.mark.parametrize(("worker", "words"), REFUSED)
async def test_a_model_that_is_refused_ends_what_serve_began(directory, worker, words):
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    process = Process(directory, pass_fds=(reading,), PELTON_SUPERVISOR_FD=str(reading))
    os.close(reading)
    try:
        with FakeWorker(directory, **worker):
            assert await asyncio.to_thread(process.popen.wait, PATIENCE_SECONDS) == EXIT_REFUSED
        output = process.log.read_text()
        assert f"pelton gateway: the model cannot be served: {words}" in output and "Traceback" not in output
    finally:
        process.kill()
        os.close(writing)


@pytest.mark.parametrize(("worker", "words"), REFUSED)
async def test_a_gateway_by_itself_waits_for_other_workers(directory, worker, words):
    async with running(directory) as (process, url), aiohttp.ClientSession() as session:
        with FakeWorker(directory, **worker):
            await process.says(words)
            await ready(session, url, 503)
        with FakeWorker(directory, index=1):
            await ready(session, url)
        assert await process.end() == 0


async def test_a_refused_worker_ends_no_gateway_that_has_another(directory):
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    with FakeWorker(directory):
        async with running(directory, pass_fds=(reading,), PELTON_SUPERVISOR_FD=str(reading)) as (process, url):
            os.close(reading)
            async with aiohttp.ClientSession() as session:
                await ready(session, url)
                with FakeWorker(directory, index=1, bundle=Bundle(bundle_hash="broken", tokenizer_json=b"{}")):
                    await process.says("bundle_not_usable")
                await ready(session, url)
            os.close(writing)
            assert await asyncio.to_thread(process.popen.wait, PATIENCE_SECONDS) == 0


async def test_ready_and_watchdog_notifications(directory, tmp_path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(PATIENCE_SECONDS)
        async with running(directory, NOTIFY_SOCKET=str(path), WATCHDOG_USEC="200000") as (process, _):
            seen: set[str] = set()
            while not {"READY=1", "WATCHDOG=1"} <= seen:
                seen |= set((await asyncio.to_thread(receiver.recv, 4096)).decode().split("\n"))
            process.popen.terminate()
            while "STOPPING=1" not in seen:
                seen |= set((await asyncio.to_thread(receiver.recv, 4096)).decode().split("\n"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--api-key-file", "/nonexistent"], "--api-key-file"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--no-such-flag"], "no-such-flag"),
        (["--api-key", "with space"], "API key"),
        (["--port", "BUSY"], "is in use"),
        (["--gateway-processes", "2"], "--port 0 cannot be combined with --gateway-processes"),
        (
            ["--gateway-processes", "2", "--gateway-index", "2", "--port", "1024"],
            "--gateway-index is 2; it must be below",
        ),
    ],
)
def test_configuration_that_cannot_be_used(directory, args, words):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        args = [str(busy.getsockname()[1]) if arg == "BUSY" else arg for arg in args]
        port = [] if "--port" in args else ["--port", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "gateway", *port, "--runtime-dir", str(directory), *args],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert "with space" not in done.stderr


async def test_keys_by_file_and_environment(directory, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# who\nsk-one name=alice\n\nsk-two name=root scope=admin\n")
    env = {"PELTON_API_KEY": "sk-three"}
    async with (
        running(directory, "--api-key-file", str(keys), **env) as (process, url),
        aiohttp.ClientSession() as session,
    ):
        for key, status in (("sk-one", 200), ("sk-two", 200), ("sk-three", 200), ("sk-four", 401)):
            async with session.get(url + "/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == status
        # With keys any Host header is allowed.
        async with session.get(url + "/health", headers={"Host": "pelton.example"}) as response:
            assert response.status == 200 and json.loads(await response.read()) == {"status": "ok"}
        assert await process.end() == 0
        assert "sk-" not in process.log.read_text()


async def test_two_gateways_of_one_index_do_not_share_a_port(directory):
    with shared_port() as port:
        flags = ("--gateway-processes", "2", "--port", str(port))
        async with running(directory, *flags):
            command = [sys.executable, "-m", "gateway", "--runtime-dir", str(directory), *flags]
            options = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS, "check": False}
            done = await asyncio.to_thread(functools.partial(subprocess.run, command, **options))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a gateway with --gateway-index 0 is already running" in done.stderr
