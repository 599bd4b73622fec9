"""/v1/responses: states of a response while it runs, after its client left, and after cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.flow.events import TextDelta
from gateway.http.app_keys import SERVICES
from gateway.text.formats import TOOL_FORMATS, ModelFormats
from gateway.text.message_parser import ToolCallDelta
from tests.fakes.fake_generator import MODEL, SUPPORT
from tests.fakes.http_gateway import Gateway, parse_named_events, run_gateway
from tests.integration.test_http_responses import TOOL, ask, create

BODY = {"model": MODEL, "input": "hi", "stream": True}


@pytest.fixture
async def gateway():
    async with run_gateway() as running:
        running.generator.script = lambda _: [TextDelta(0, "Hel", [1]), asyncio.Event()]
        yield running


async def next_event(response: aiohttp.ClientResponse) -> Any:
    raw = await response.content.readuntil(b"\n\n")
    return orjson.loads(raw.partition(b"data: ")[2])


async def read_until(response: aiohttp.ClientResponse, kind: str) -> Any:
    while (event := await next_event(response))["type"] != kind:
        pass
    return event


async def ended(gateway: Gateway, identifier: str) -> Any:
    """Return the response once it has ended."""
    for _ in range(4000):
        status, body = await ask(gateway, "GET", f"/v1/responses/{identifier}")
        if status != 200 or body["status"] not in ("queued", "in_progress"):
            break
        await asyncio.sleep(0.01)
    return body


async def test_a_streamed_response_is_visible_and_cancelled_on_disconnect(gateway):
    async with gateway.session.post(gateway.url + "/v1/responses", json=BODY) as response:
        made = (await next_event(response))["response"]["id"]
        status, body = await ask(gateway, "GET", f"/v1/responses/{made}")
        assert (status, body["status"], body["output"]) == (200, "in_progress", [])
        assert (await create(gateway, previous_response_id=made))[0] == 400
        assert (await ask(gateway, "POST", f"/v1/responses/{made}/cancel"))[0] == 400
        assert (await ask(gateway, "GET", f"/v1/responses/{made}/input_items"))[1]["data"][0]["role"] == "user"
        await read_until(response, "response.output_text.delta")
        response.close()
    body = await ended(gateway, made)
    assert body["status"] == "cancelled" and body["incomplete_details"] is None and body["completed_at"] is None
    assert body["output"][0]["status"] == "incomplete" and body["output"][0]["content"][0]["text"] == "Hel"
    assert body["usage"]["output_tokens"] == 1
    assert await gateway.generations_left() == 0
    gateway.generator.script = lambda _: [TextDelta(0, "Hello", [1], finish_reason="stop")]
    assert (await create(gateway, input="and", previous_response_id=made))[0] == 200
    said = gateway.models.entry.pipeline.messages[-1]
    assert [message["content"] for message in said] == ["hi", "Hel", "and"]


async def test_responses_whose_id_was_not_sent_are_not_stored(gateway):
    request = asyncio.ensure_future(create(gateway))
    while not gateway.generator.live:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    request.cancel()
    assert await gateway.generations_left() == 0
    body = {**BODY, "store": False}
    async with gateway.session.post(gateway.url + "/v1/responses", json=body) as response:
        await read_until(response, "response.output_text.delta")
        response.close()
    assert await gateway.generations_left() == 0 and len(gateway.app[SERVICES].responses) == 0


async def test_a_response_deleted_while_streaming_is_not_stored(gateway):
    go_on = asyncio.Event()
    last = TextDelta(0, "lo", [2], finish_reason="stop")
    gateway.generator.script = lambda _: [TextDelta(0, "Hel", [1]), go_on, last]
    async with gateway.session.post(gateway.url + "/v1/responses", json=BODY) as response:
        made = (await next_event(response))["response"]["id"]
        assert (await ask(gateway, "DELETE", f"/v1/responses/{made}"))[0] == 200
        go_on.set()
        assert (await read_until(response, "response.completed"))["response"]["id"] == made
    assert (await ask(gateway, "GET", f"/v1/responses/{made}"))[0] == 404
    assert len(gateway.app[SERVICES].responses) == 0


@pytest.mark.parametrize(("method", "path"), [("POST", "/cancel"), ("DELETE", "")])
@pytest.mark.parametrize("said", [0, 1])
async def test_readers_of_a_cancelled_response_get_a_last_event(gateway, method, path, said):
    gateway.generator.script = lambda _: [*[TextDelta(0, "Hel", [1])] * said, asyncio.Event()]
    status, body = await create(gateway, background=True)
    made = body["id"]
    url = f"{gateway.url}/v1/responses/{made}?stream=true"
    reading = asyncio.ensure_future(gateway.session.get(url))
    await read_until(await reading, "response.output_text.delta" if said else "response.queued")
    status, answer = await ask(gateway, method, f"/v1/responses/{made}{path}")
    assert status == 200
    async with asyncio.timeout(40), await reading as response:
        raw = await response.read()
    events = parse_named_events(raw)
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
    assert last["response"]["incomplete_details"] is None and last["response"]["usage"]["output_tokens"] == said
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(events)))
    before = ["output_text.done", "content_part.done", "output_item.done"] if said else []
    assert [event["type"].removeprefix("response.") for event in events[:-1]] == before
    status, body = await ask(gateway, "GET", f"/v1/responses/{made}")
    assert (status, body) == ((200, answer) if path else (404, body))
    if path:
        assert answer == last["response"]
        assert (await gateway.get(f"/v1/responses/{made}?stream=true"))[1].endswith(raw)
    else:
        assert (await gateway.get(f"/v1/responses/{made}?stream=true"))[0] == 404
        assert made not in gateway.app[SERVICES].responses


async def test_a_background_stream_begins_with_its_queued_state(gateway):
    go_on = asyncio.Event()
    gateway.generator.script = lambda _: [go_on, TextDelta(0, "Hello", [1], finish_reason="stop")]
    async with gateway.session.post(gateway.url + "/v1/responses", json={**BODY, "background": True}) as response:
        waiting = [await next_event(response) for _ in range(2)]
        assert [event["type"] for event in waiting] == ["response.created", "response.queued"]
        made = waiting[0]["response"]["id"]
        status, body = await ask(gateway, "GET", f"/v1/responses/{made}")
        assert status == 200 and waiting[0]["response"] == waiting[1]["response"] == body
        assert body["status"] == "queued"
        async with gateway.session.get(f"{gateway.url}/v1/responses/{made}?stream=true&starting_after=0") as again:
            assert await next_event(again) == waiting[1]
            go_on.set()
            events = [*waiting, begun := await next_event(response)]
            assert (begun["type"], begun["response"]["status"]) == ("response.in_progress", "in_progress")
            while events[-1]["type"] != "response.completed":
                events.append(await next_event(response))
            assert [await next_event(again) for _ in events[2:]] == events[2:]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_truncated_call_is_not_continued(gateway):
    gateway.models.entry.formats = ModelFormats(template=SUPPORT, tools=TOOL_FORMATS["hermes"])
    call = ToolCallDelta(0, '{"a', "call_1", "f")
    gateway.generator.script = lambda _: [
        TextDelta(0, "Let me.", [1]),
        TextDelta(0, "", [2], tool_calls=[call], finish_reason="length"),
    ]
    status, body = await create(gateway, tools=[TOOL])
    assert status == 200 and body["status"] == "incomplete"
    assert [item["type"] for item in body["output"]] == ["message", "function_call"]
    assert (await create(gateway, input="Go on.", previous_response_id=body["id"]))[0] == 200
    assert [message["content"] for message in gateway.models.entry.pipeline.messages[-1]] == [
        "hi", "Let me.", "Go on."
    ]  # fmt: skip
