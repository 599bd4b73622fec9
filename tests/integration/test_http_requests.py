"""Aborting a running request, rendering a prompt, and the version."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json

import pytest
from aiohttp import web

from gateway.app import FOLLOW_UPS
from gateway.flow.events import TextDelta
from gateway.siblings import Siblings, peer_socket, sibling_app
from tests.fakes.fake_generator import MODEL, FakeGenerator
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import ADMIN_KEY, OTHER_KEY, USER_KEY, parse_events, run_gateway

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def endless(_request):
    return [TextDelta(0, "a", [97]), asyncio.Event()]


@pytest.fixture
async def busy():
    """Run a gateway whose generations never end."""
    async with run_gateway(FakeGenerator(endless), keys=True) as running:
        running.headers = bearer(USER_KEY)
        yield running


async def delete(gateway, identifier, key=USER_KEY):
    url = f"{gateway.url}/v1/requests/{identifier}"
    async with gateway.session.delete(url, headers=bearer(key)) as response:
        return response.status, await response.json()


async def test_a_stream_is_aborted_by_the_id_of_its_response(busy):
    body = {**CHAT, "stream": True}
    async with busy.session.post(busy.url + "/v1/chat/completions", json=body, headers=busy.headers) as answer:
        first = await answer.content.readuntil(b"\n\n")
        identifier = json.loads(first.removeprefix(b"data: "))["id"]
        status, error = await delete(busy, identifier, OTHER_KEY)
        assert status == 404 and error["error"]["code"] == "not_found"
        assert await delete(busy, identifier) == (200, {"id": identifier, "object": "request", "aborted": True})
        events = parse_events(await answer.read())
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "request_aborted"
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-2])
    assert await busy.generations_left() == 0 and busy.generator.generations[0].cancelled
    assert (await delete(busy, identifier))[0] == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_whole_answer_is_aborted_by_the_id_of_its_http_request(busy, path):
    body = CHAT if "chat" in path else {"model": MODEL, "prompt": ["a", "b"]}
    headers = {"X-Request-Id": "mine"}
    running = [asyncio.create_task(busy.post(path, body, **headers)) for _ in range(2)]
    await until(lambda: len(busy.generator.live) == (2 if "chat" in path else 4))
    assert (await delete(busy, "mine", OTHER_KEY))[0] == 404
    assert (await delete(busy, "mine"))[0] == 200
    for status, error, _ in await asyncio.gather(*running):
        assert status == 400 and error["error"]["code"] == "request_aborted"
    assert await busy.generations_left() == 0 and busy.drain.num_in_flight == 0
    busy.generator.script = lambda _: [TextDelta(0, "a", [97], finish_reason="stop")]
    assert (await busy.chat())[0] == 200


async def test_a_resumable_stream_is_aborted_with_and_without_a_connection(busy):
    body = {**CHAT, "stream": True, "stream_options": {"resumable": True}}
    url = busy.url + "/v1/chat/completions"
    async with busy.session.post(url, json=body, headers=busy.headers) as answer:
        first = await answer.content.readuntil(b"\n\n")
    identifier = json.loads(first.partition(b"data: ")[2])["id"]
    assert (await delete(busy, identifier))[0] == 200
    status, rest, _ = await busy.get(f"/v1/streams/{identifier}")
    assert status == 200 and b"request_aborted" in rest and rest.endswith(b"data: [DONE]\n\n")
    assert await busy.generations_left() == 0


async def test_nothing_is_left_of_requests_that_ended(gateway):
    for _ in range(3):
        assert (await gateway.chat())[0] == 200
    gateway.generator.submit_error = RuntimeError("no")
    assert (await gateway.chat())[0] == 500
    assert not gateway.drain._named and not gateway.drain._aborted


async def test_render_chat(gateway):
    status, body, _ = await gateway.post("/v1/chat/completions/render", CHAT)
    text = "user: hi\nassistant:"
    ids = list(text.encode())
    prompt = {"index": 0, "prompt": text, "token_ids": ids, "max_tokens": 4096 - len(ids)}
    assert (status, body) == (200, {"object": "rendered_prompts", "model": MODEL, "prompts": [prompt]})
    assert (await gateway.chat())[0] == 200
    assert [request.prompt_token_ids for request in gateway.generator.requests] == [ids]


async def test_render_completions(gateway):
    body = {"model": MODEL, "prompt": ["ab", "c"], "truncate_prompt_tokens": 1, "max_tokens": 3}
    status, answer, _ = await gateway.post("/v1/completions/render", body)
    assert status == 200
    assert [(one["prompt"], one["token_ids"], one["max_tokens"]) for one in answer["prompts"]] == [
        ("b", [98], 3),
        ("c", [99], 3),
    ]
    assert not gateway.generator.requests


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 3}, {"no_such": 1}, {"model": "nope"}, {"max_tokens": 5000}, {"logit_bias": {"999": 1}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "intt"}}}},
        {"speculative": {"enabled": True}}, {"service_tier": "gold"},
    ],
)  # fmt: skip
async def test_rendering_refuses_what_running_refuses(gateway, change):
    refused = await gateway.chat(**change)
    assert refused[0] in (400, 404)
    assert (await gateway.post("/v1/chat/completions/render", {**CHAT, **change}))[:2] == refused[:2]


async def test_version():
    async with run_gateway(keys=True) as gateway:
        status, body, _ = await gateway.get("/version")
        assert status == 200 and json.loads(body) == {"version": importlib.metadata.version("pelton")}


@pytest.fixture
async def two_processes(tmp_path):
    """Return the gateway that clients reach and the one that runs the request."""
    relay = Siblings(tmp_path, 0, 2)
    other = run_gateway(FakeGenerator(endless), keys=True, gateway_index=1)
    async with run_gateway(keys=True, relay=relay) as reached, other as running:
        runner = web.AppRunner(sibling_app(FOLLOW_UPS, running.app), handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(peer_socket(tmp_path, 1))).start()
        running.headers = bearer(USER_KEY)
        yield reached, running
        await runner.cleanup()


async def test_a_request_of_another_process_is_aborted_by_either_id(two_processes):
    reached, running = two_processes
    url = running.url + "/v1/chat/completions"
    async with running.session.post(url, json={**CHAT, "stream": True}, headers=running.headers) as answer:
        identifier = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))["id"]
        assert identifier.startswith("chatcmpl-01")
        assert (await delete(reached, identifier, OTHER_KEY))[0] == 404
        assert (await delete(reached, identifier))[0] == 200
        assert b"request_aborted" in await answer.read()
    for key in (USER_KEY, ADMIN_KEY):
        task = asyncio.create_task(running.post("/v1/chat/completions", CHAT, **{"X-Request-Id": "mine"}))
        await until(lambda: running.generator.live)
        assert (await delete(reached, "mine", OTHER_KEY))[0] == 404
        assert (await delete(reached, "mine", key))[0] == 200
        assert (await task)[0] == 400
    assert (await delete(reached, "mine"))[0] == 404


async def test_an_unknown_request_is_503_while_a_process_is_silent(tmp_path):
    async with run_gateway(relay=Siblings(tmp_path, 0, 2)) as gateway:
        async with gateway.session.delete(gateway.url + "/v1/requests/unknown") as response:
            assert response.status == 503 and response.headers["Retry-After"]
