"""Two gateway processes over one fake worker: each serves what the other one stores."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from gateway.stores.ids import gateway_of
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.prepared_server import GatewayProcess
from tests.fakes.processes import shared_port
from tests.integration.test_http_resumable import parsed

KEYS = ("sk-one-0123456789", "sk-two-0123456789")


@dataclass(frozen=True)
class Pair:
    """Both gateways, each on its own port, because clients cannot choose on a shared port."""

    processes: list[GatewayProcess]
    worker: FakeWorker

    async def ask(self, which: int, method: str, path: str, key: int = 0, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {KEYS[key]}", **options.pop("headers", {})}
        async with (
            aiohttp.ClientSession(self.processes[which].url) as session,
            session.request(method, path, headers=headers, **options) as response,
        ):
            parse = response.content_type == "application/json"
            return response.status, await response.json() if parse else await response.read()

    async def create(self, which: int, key: int = 0, **fields: Any) -> tuple[int, Any]:
        body = {"model": "fake", "input": "hello", "max_output_tokens": 100, **fields}
        return await self.ask(which, "POST", "/v1/responses", key, json=body)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("siblings") / "r"
    directory.mkdir(mode=0o700)
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    with FakeWorker(directory, delay=0.005) as worker, contextlib.ExitStack() as stack:
        processes = []
        for index in "01":
            port = str(stack.enter_context(shared_port()))
            flags = ("--gateway-processes", "2", "--gateway-index", index, "--port", port, *keys)
            processes.append(stack.enter_context(GatewayProcess(directory, *flags)))
        for process in processes:
            process.await_ready()
        yield Pair(processes, worker)


async def test_both_processes_serve_a_stored_response(pair):
    status, made = await pair.create(1)
    assert status == 200 and gateway_of(made["id"]) == 1
    path = f"/v1/responses/{made['id']}"
    for which in (0, 1):
        assert await pair.ask(which, "GET", path) == (200, made)
        status, items = await pair.ask(which, "GET", path + "/input_items?order=asc&limit=1")
        assert status == 200 and items["data"][0]["content"][0]["text"] == "hello"
        status, body = await pair.ask(which, "GET", path, key=1)
        assert status == 404 and body["error"]["code"] == "not_found"
        status, continued = await pair.create(which, previous_response_id=made["id"])
        assert status == 200 and continued["usage"]["input_tokens"] > made["usage"]["input_tokens"]
        assert (await pair.create(which, key=1, previous_response_id=made["id"]))[0] == 400
        assert (await pair.ask(which, "POST", path + "/cancel"))[0] == 400
        items = [{"type": "item_reference", "id": made["output"][0]["id"]}, {"role": "user", "content": "more"}]
        status, referring = await pair.create(which, input=items, store=False)
        assert status == 200 and referring["usage"]["input_tokens"] > 5
        assert (await pair.create(which, key=1, input=items))[0] == 404
    assert (await pair.ask(0, "DELETE", path))[1]["deleted"]
    assert (await pair.create(0, input=items))[0] == 404
    assert {(await pair.ask(which, "GET", path))[0] for which in (0, 1)} == {404}
    pair.worker.faults.stalled = True
    status, made = await pair.create(0, background=True)
    status, body = await pair.ask(1, "POST", f"/v1/responses/{made['id']}/cancel")
    assert (status, body["status"]) == (200, "cancelled")
    pair.worker.faults.stalled = False


async def test_a_stream_is_resumed_at_the_other_process(pair):
    body: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "It goes on and on. " * 3}]}
    whole = (await pair.ask(1, "POST", "/v1/chat/completions", json=body))[1]["choices"][0]["message"]["content"]
    body |= {"stream": True, "stream_options": {"resumable": True}}
    raw = b""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    url = pair.processes[0].url + "/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        while raw.count(b"\n\n") < 5:
            raw += await response.content.readuntil(b"\n\n")
        response.close()
    seen = parsed(raw)
    path = f"/v1/streams/{seen[0][1]['id']}"
    options = {"headers": {"Last-Event-ID": "5"}}
    assert (await pair.ask(1, "GET", path, key=1, headers={"Last-Event-ID": "5"}))[0] == 404
    status, rest = await pair.ask(1, "GET", path, **options)
    assert status == 200
    events = seen + parsed(rest)
    assert [number for number, _ in events] == list(range(1, len(events) + 1)) and events[-1][1] == "[DONE]"
    choices = [data["choices"][0] for _, data in events[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole and len(whole) > 20
    assert (await pair.ask(1, "GET", path, headers={"Last-Event-ID": str(len(events))}))[0] == 204


async def test_responses_of_a_killed_process_are_unavailable(pair):
    _, made = await pair.create(1)
    assert (await pair.ask(0, "GET", "/v1/responses/resp_3f" + "0" * 30))[0] == 404, "there is no such process"
    # This is the last test of the two processes.
    pair.processes[1].end(signal.SIGKILL)
    assert (await pair.ask(0, "GET", f"/v1/responses/{made['id']}"))[0] == 503
    status, body = await pair.create(0, previous_response_id=made["id"])
    assert status == 503 and "/" not in body["error"]["message"]
    assert (await pair.create(0))[0] == 200
