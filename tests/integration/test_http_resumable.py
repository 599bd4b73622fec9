"""Streams that survive their connection: stream_options.resumable and GET /v1/streams/{id}."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson

from gateway.flow.events import TextDelta
from gateway.stores.streams import StreamStore
from shared.errors import UnavailableError, WorkerLostError
from tests.fakes.fake_generator import MODEL, FakeGenerator, spell
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import OTHER_KEY, USER_KEY, Gateway, run_gateway

TEXT = "Hello, \u2028 you \U0001f600!"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
RESUMABLE = {"stream_options": {"resumable": True, "include_usage": True}}
_EVENT = re.compile(rb"id: (\d+)\ndata: (.*)\n\n")


def parsed(raw: bytes) -> list[tuple[int, Any]]:
    """Return (id, data) of each event; every event has both."""
    events = _EVENT.findall(raw)
    assert b"".join(b"id: %b\ndata: %b\n\n" % event for event in events) == raw, raw
    return [(int(number), data.decode() if data == b"[DONE]" else orjson.loads(data)) for number, data in events]


def text_of(events: list[tuple[int, Any]]) -> str:
    choices = [choice for _, data in events if data != "[DONE]" for choice in data["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def first_events(gateway: Gateway, number: int, **fields: Any) -> tuple[str, list[tuple[int, Any]]]:
    """Return the id and first events of a stream, then disconnect."""
    url, body = gateway.url + "/v1/chat/completions", {**CHAT, **RESUMABLE, **fields}
    raw = b""
    async with gateway.session.post(url, json=body, headers=gateway.headers) as response:
        assert response.status == 200, await response.read()
        while raw.count(b"\n\n") < number:
            raw += await response.content.readuntil(b"\n\n")
        response.close()
    events = parsed(raw)
    return events[0][1]["id"], events


async def resume(gateway: Gateway, identifier: str, seen: int | str = "", **headers: str) -> tuple[int, bytes]:
    sent = {"Last-Event-ID": str(seen)} if seen != "" else {}
    status, body, _ = await gateway.get(f"/v1/streams/{identifier}", **sent, **headers)
    return status, body


async def test_a_stream_is_resumed_after_any_event(gateway):
    gateway.generator.script = spell(TEXT, cached=3)
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json={**CHAT, **RESUMABLE}) as response:
        whole = parsed(await response.read())
    assert text_of(whole) == TEXT and whole[-1][1] == "[DONE]" and whole[-2][1]["usage"]["completion_tokens"]
    for number in range(1, len(whole) + 1):
        identifier, seen = await first_events(gateway, number)
        assert len(seen) == number
        status, body = await resume(gateway, identifier, number)
        if number == len(whole):
            assert (status, body) == (204, b"")
            continue
        events = seen + parsed(body)
        assert [one for one, _ in events] == list(range(1, len(whole) + 1))
        assert text_of(events) == TEXT and events[-1][1] == "[DONE]"
        assert {data["id"] for _, data in events[:-1]} == {identifier}
        assert (await resume(gateway, identifier, len(whole)))[0] == 204


async def test_a_stream_continues_with_and_without_a_reader(gateway):
    gate, script = asyncio.Event(), [*spell("ab")()]
    steps = [*script[:1], gate, *script[1:]]
    gateway.generator.script = lambda _: list(steps)
    identifier, seen = await first_events(gateway, 2)
    await until(lambda: gateway.drain.num_in_flight == 1)
    reading = asyncio.create_task(resume(gateway, identifier, 2))
    await until(lambda: gateway.drain.num_in_flight == 2)
    assert not reading.done() and gateway.generator.live
    gate.set()
    assert text_of(seen + parsed((await reading)[1])) == "ab"
    assert await gateway.generations_left() == 0 and not gateway.generator.generations[0].cancelled


async def test_streams_are_private_to_their_key_and_event_ids_are_checked():
    async with run_gateway(FakeGenerator(spell("abc")), keys=True) as gateway:
        gateway.headers["Authorization"] = f"Bearer {USER_KEY}"
        identifier, _ = await first_events(gateway, 2)
        assert (await resume(gateway, identifier, 1))[0] == 200
        assert (await resume(gateway, identifier, 1, Authorization=f"Bearer {OTHER_KEY}"))[0] == 404
        assert (await resume(gateway, identifier, 1, Authorization="Bearer wrong"))[0] == 401
        assert (await resume(gateway, identifier[:-1] + "x"))[0] == 404
        for wrong in ("x", "-1", "1.0", "999", "9" * 30):
            status, body = await resume(gateway, identifier, wrong)
            assert status == 400 and orjson.loads(body)["error"]["param"] == "Last-Event-ID"


async def test_failures_are_events_of_the_stream(gateway):
    steps = [TextDelta(0, "Hel", [1]), WorkerLostError("The worker died.")]
    gateway.generator.script = lambda _: list(steps)
    identifier, _ = await first_events(gateway, 1)
    _, body = await resume(gateway, identifier, 1)
    *_, (_, error), (_, done) = parsed(body)
    assert error["error"]["code"] == "worker_lost" and done == "[DONE]"
    steps[:] = [WorkerLostError("The worker died.")]
    status, body, _ = await gateway.post("/v1/chat/completions", {**CHAT, **RESUMABLE})
    assert status == 503 and body["error"]["code"] == "worker_lost"
    gateway.generator.submit_error = UnavailableError("None.")
    assert (await gateway.post("/v1/chat/completions", {**CHAT, **RESUMABLE}))[0] == 503
    assert await gateway.generations_left() == 0


async def test_a_reader_behind_the_buffer_gets_an_error():
    streams = StreamStore(max_bytes=16 * 2000, grace=50.0)
    async with run_gateway(FakeGenerator(spell("x" * 100)), streams=streams) as gateway:
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json={**CHAT, **RESUMABLE}) as response:
            whole = parsed(await response.read())
        assert text_of(whole) == "x" * 100, "one that keeps up gets all"
        status, body = await resume(gateway, whole[0][1]["id"], 1)
        assert status == 404 and orjson.loads(body)["error"]["code"] == "stream_expired"


async def test_a_shutdown_ends_a_resumable_stream_with_an_error(gateway):
    steps = [*[*spell("ab")()][:1], asyncio.Event()]
    gateway.generator.script = lambda _: list(steps)
    identifier, _ = await first_events(gateway, 1)
    url = f"{gateway.url}/v1/streams/{identifier}"
    async with gateway.session.get(url, headers={"Last-Event-ID": "1"}) as response:
        await response.content.readuntil(b"\n\n")
        gateway.drain.begin()
        assert not await gateway.drain.wait(0.01)
        body = await response.content.read()
        assert response.status == 200 and b"shutting down" in body and body.endswith(b"data: [DONE]\n\n")
    assert await gateway.generations_left() == 0


async def test_resumable_needs_a_stream(gateway):
    status, body, _ = await gateway.chat(stream_options={"resumable": True})
    assert status == 400 and body["error"]["param"] == "stream_options"
