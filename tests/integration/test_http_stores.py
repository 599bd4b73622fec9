"""Stored responses and streams under clients that misuse them."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
import structlog

import gateway.stores.streams
from gateway.flow.events import TextDelta
from gateway.http.app_keys import SERVICES
from gateway.server import HttpProtocol
from gateway.stores.responses import ResponseStore
from gateway.stores.streams import StreamStore
from shared.errors import RateLimitError, UnavailableError
from tests.fakes.fake_generator import MODEL, FakeEntry, FakeGenerator, FakeModels, facts, spell
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import until
from tests.fakes.growth import held, kept
from tests.fakes.http_gateway import OTHER_KEY, USER_KEY, Gateway, run_gateway
from tests.fakes.prepared_server import GatewayProcess
from tests.integration.test_http_responses import ask, background, create
from tests.integration.test_http_resumable import first_events, parsed, resume, text_of

RESUMABLE = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"resumable": True}}


@asynccontextmanager
async def small_gateway() -> AsyncIterator[Gateway]:
    """Run a gateway whose limits are reached at once."""
    responses = ResponseStore(max_bytes=200_000, time_to_live=60.0)
    streams = StreamStore(max_bytes=200_000, grace=1.0)
    async with run_gateway(responses=responses, streams=streams, max_requests=1000) as gateway:
        yield gateway


async def leave_stream(gateway: Gateway, path: str, body: dict[str, Any], num_events: int) -> None:
    """Disconnect after a number of events, or at the end of the stream."""
    async with gateway.session.post(gateway.url + path, json=body) as response:
        assert response.status == 200
        for _ in range(num_events):
            if not (await response.content.readline()).strip():
                break
        response.close()


def endless() -> list[TextDelta | asyncio.Event]:
    """Return a script that begins and never ends."""
    return [TextDelta(0, "Hel", [1]), asyncio.Event()]


async def stored(gateway: Gateway, _: int) -> None:
    assert (await create(gateway))[0] == 200


async def continued(gateway: Gateway, _: int) -> None:
    first = (await create(gateway))[1]["id"]
    second = (await create(gateway, previous_response_id=first))[1]["id"]
    assert (await ask(gateway, "DELETE", f"/v1/responses/{first}"))[0] == 200
    assert (await create(gateway, previous_response_id=second))[0] == 200


async def in_the_background(gateway: Gateway, _: int) -> None:
    made = (await create(gateway, background=True))[1]["id"]
    assert (await gateway.get(f"/v1/responses/{made}?stream=true"))[0] == 200


async def deleted_while_it_runs(gateway: Gateway, _: int) -> None:
    made = await background(gateway, *endless())
    assert (await ask(gateway, "DELETE", f"/v1/responses/{made}"))[0] == 200


async def cancelled(gateway: Gateway, _: int) -> None:
    made = await background(gateway, *endless())
    assert (await ask(gateway, "POST", f"/v1/responses/{made}/cancel"))[1]["status"] == "cancelled"


async def refused(gateway: Gateway, _: int) -> None:
    gateway.generator.submit_error = RateLimitError("Full.", retry_after=1.0)
    assert (await create(gateway, background=True))[0] == 429
    assert (await gateway.post("/v1/completions", RESUMABLE))[0] == 429
    gateway.generator.submit_error = None


async def left(gateway: Gateway, number: int) -> None:
    await leave_stream(gateway, "/v1/completions", RESUMABLE, number % 7)
    await leave_stream(gateway, "/v1/responses", {"model": MODEL, "input": "x", "stream": True}, number % 7)


async def left_for_good(gateway: Gateway, _: int) -> None:
    gateway.generator.script = lambda _: endless()
    await leave_stream(gateway, "/v1/completions", RESUMABLE, 1)


@pytest.fixture
def quiet():
    """Disable log lines, which pytest keeps."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


async def failed_and_read_again(gateway: Gateway, _: int) -> None:
    gate = asyncio.Event()
    made = await background(gateway, gate, UnavailableError("None."))
    gate.set()
    for _ in range(2):
        status, body, _ = await gateway.get(f"/v1/responses/{made}?stream=true")
        assert status == 200 and b"event: response.failed" in body


ACTS = (
    stored, continued, in_the_background, deleted_while_it_runs, cancelled, refused, left, left_for_good,
    failed_and_read_again,
)  # fmt: skip


@pytest.mark.usefixtures("quiet")
async def test_ended_requests_leave_no_objects(monkeypatch):
    monkeypatch.setattr(gateway.stores.streams, "_SLACK", 0)
    async with small_gateway() as running:

        async def some(count: int) -> None:
            for number in range(count):
                for act in ACTS:
                    running.generator.script = spell("Hello")
                    await act(running, number)
            await until(lambda: not running.generator.live and not running.drain.num_in_flight)
            await asyncio.sleep(1.1)  # the grace period and closing connections
            running.generator.generations.clear()
            running.models.entry.pipeline.messages.clear()
            running.models.entry.pipeline.template_kwargs.clear()

        await some(40)  # The stores are then full, and the client has its maximum of URLs.
        before, tasks = held(), len(asyncio.all_tasks())
        await some(100)
        for _ in range(100):
            # Work that a busy machine has not finished by then.
            if len(asyncio.all_tasks()) <= tasks and not kept(before, held(), most=70):
                break
            await asyncio.sleep(0.1)
        assert not kept(before, held(), most=70)
        assert len(asyncio.all_tasks()) <= tasks and not running.generator.live


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_background_response_evicts_nothing(stream):
    responses, streams = ResponseStore(max_bytes=10_000, time_to_live=60.0), StreamStore(max_bytes=1 << 20, grace=60.0)
    async with run_gateway(responses=responses, streams=streams) as gateway:
        made = (await create(gateway))[1]["id"]
        gateway.generator.submit_error = RateLimitError("Full.", retry_after=2.0)
        for _ in range(20):
            status, body = await create(gateway, background=True, stream=stream)
            assert (status, body["error"]["message"]) == (429, "Full.")
        assert (await ask(gateway, "GET", f"/v1/responses/{made}"))[0] == 200
        assert (len(responses), len(streams), gateway.drain.num_in_flight) == (1, 0, 0)


async def test_many_readers_of_one_stream_get_all_of_it():
    gate = asyncio.Event()
    steps = [TextDelta(0, "a", [1]), gate, TextDelta(0, "b", [1]), TextDelta(0, "", [], finish_reason="stop")]
    async with run_gateway(FakeGenerator(lambda _: list(steps)), max_requests=500) as gateway:
        identifier, seen = await first_events(gateway, 2)
        head = f"GET /v1/streams/{identifier} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nLast-Event-ID: "
        readers: list[asyncio.Task[bytes]] = []
        # A few at a time, so that none waits for its connection.
        for first in range(0, 200, 100):
            requests = [f"{head}{index % 3}\r\n\r\n".encode() for index in range(first, first + 100)]
            readers += [asyncio.create_task(gateway.raw(request, timeout=150)) for request in requests]
            while gateway.drain.num_in_flight <= len(readers):
                assert not any(one.done() for one in readers)
                await asyncio.sleep(0.01)
        gate.set()
        for index, answer in enumerate(await asyncio.gather(*readers)):
            events = b"".join(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
            assert text_of(seen[: index % 3] + parsed(events)) == "ab"


async def test_slow_readers_buffer_little():
    """The kernel's socket buffers hold a part of each stream."""
    steps = [*[TextDelta(0, "x" * 60_000, [1])] * 400, TextDelta(0, "", [], finish_reason="stop")]
    streams = StreamStore(max_bytes=1 << 29, grace=60.0)
    async with run_gateway(FakeGenerator(lambda _: list(steps)), streams=streams, write_timeout=60.0) as running:
        identifier, _ = await first_events(running, 1)
        assert await running.generations_left() == 0 and streams.num_bytes > 20_000_000
        sockets = [socket.socket() for _ in range(4)]
        for one in sockets:
            # Where the system allows buffers of tens of megabytes, they would hold the whole stream.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            one.connect(("127.0.0.1", running.port))
            one.sendall(f"GET /v1/streams/{identifier} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        await until(lambda: len([one for one in connections() if one.writing_paused]) == len(sockets))
        served = connections()
        waiting = [one.transport.get_write_buffer_size() for one in served]
        for one in sockets:
            one.close()
        assert max(waiting) < 400_000


def connections() -> list[Any]:
    """Return the server's connections that have a request."""
    every = [one for one in gc.get_objects() if type(one) is HttpProtocol]
    return [one for one in every if one.transport is not None and one._request_in_progress]


async def test_concurrent_cancels_end_a_response_once(gateway):
    for seen in range(5):
        made = await background(gateway, *[TextDelta(0, "Hel", [1])] * seen, asyncio.Event())
        path = f"/v1/responses/{made}/cancel"
        answers = await asyncio.gather(*(ask(gateway, "POST", path) for _ in range(20)))
        assert [(status, body["status"]) for status, body in answers] == [(200, "cancelled")] * 20
        assert await gateway.generations_left() == 0 and gateway.drain.num_in_flight == 0


async def test_internal_headers_of_clients_are_ignored():
    async with run_gateway(keys=True) as running:
        running.headers["Authorization"] = f"Bearer {USER_KEY}"
        made = (await create(running))[1]["id"]
        identifier, _ = await first_events(running, 1)
        owner = hashlib.sha256(USER_KEY.encode()).hexdigest()
        forged = {"Authorization": f"Bearer {OTHER_KEY}", "x-pelton-owner": owner, "x-pelton-scope": "admin"}
        assert (await ask(running, "GET", f"/v1/responses/{made}", **forged))[0] == 404
        assert (await resume(running, identifier, 1, **forged))[0] == 404
        assert (await running.get("/conversation/" + made, **forged))[0] == 404
        del forged["Authorization"]
        running.headers.clear()
        assert (await ask(running, "GET", f"/v1/responses/{made}", **forged))[0] == 401


async def test_background_responses_count_towards_the_request_limit():
    async with run_gateway(max_requests=10) as gateway:
        for _ in range(9):
            await background(gateway, asyncio.Event())
        assert (await create(gateway, background=True))[0] == 429, "itself and its connection are two"
        assert len(gateway.generator.live) == 9


async def test_a_process_ends_in_time_with_responses_in_the_background(tmp_path):
    directory = tmp_path / "r"
    directory.mkdir(mode=0o700)
    with FakeWorker(directory, delay=60.0), GatewayProcess(directory, "--drain-timeout", "0.2") as process:
        async with aiohttp.ClientSession(process.await_ready()) as session:
            for _ in range(3):
                body = {"model": "fake", "input": "hi", "background": True}
                async with session.post("/v1/responses", json=body) as response:
                    assert response.status == 200
            assert process.end() == 0


async def test_a_shutdown_ends_background_responses(gateway):
    made = await background(gateway, TextDelta(0, "Hel", [1]), asyncio.Event())
    url = f"{gateway.url}/v1/responses/{made}?stream=true"
    async with gateway.session.get(url) as reader:
        read = await reader.content.readuntil(b"output_text.delta")
        gateway.drain.begin()
        assert not await gateway.drain.wait(0.01)
        read += await reader.content.read()
    events = [orjson.loads(event.partition(b"data: ")[2]) for event in read.split(b"\n\n") if event]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed", "readers get the stored status"
    assert await gateway.generations_left() == 0 and gateway.drain.num_in_flight == 0
    stored = orjson.loads(gateway.app[SERVICES].responses.get(made, b"").body)
    assert stored["status"] == "failed" and "shutting down" in stored["error"]["message"]


async def test_too_many_turns_are_refused_or_truncated_on_request():
    models = FakeModels(FakeEntry(facts(max_model_len=1 << 20, num_pages=1 << 16)))
    async with run_gateway(models=models) as gateway:
        turns = [{"role": role, "content": f"{index}"} for index in range(2048) for role in ("user", "assistant")]
        made = (await create(gateway, input=turns))[1]["id"]
        status, body = await create(gateway, previous_response_id=made)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body = await create(gateway, previous_response_id=made, truncation="auto")
        assert status == 200
        assert len(models.entry.pipeline.messages[-1]) == 4096


async def test_without_a_store_nothing_runs_in_the_background():
    async with run_gateway(responses=ResponseStore(max_bytes=0, time_to_live=60.0)) as gateway:
        status, body = await create(gateway, background=True)
        assert (status, body["error"]["param"]) == (400, "background")
        status, body = await create(gateway)
        assert status == 200 and (await ask(gateway, "GET", f"/v1/responses/{body['id']}"))[0] == 404
