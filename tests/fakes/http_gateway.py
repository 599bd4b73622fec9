"""The real application on a loopback socket, over a fake generator."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry

from gateway.app import ROUTES, build_app
from gateway.flow.salt import Salts
from gateway.http.app_keys import Services
from gateway.http.auth import ApiKey, KeyRing, Scope
from gateway.http.drain import Drain
from gateway.http.route import Route
from gateway.server import HttpRunner
from gateway.siblings import Siblings, render_metrics
from gateway.stores.responses import ResponseStore
from gateway.stores.streams import StreamStore
from gateway.text.grammars.checker import GrammarChecker
from shared.metrics import GatewayMetrics
from tests.fakes.fake_generator import MODEL, FakeGenerator, FakeModels

USER_KEY = "sk-user-key-0123456789"
OTHER_KEY = "sk-user-key-0123456789-other"
ADMIN_KEY = "sk-admin-key"
_RING = (
    ApiKey.of(USER_KEY, Scope.INFERENCE, "user"),
    ApiKey.of(OTHER_KEY, Scope.INFERENCE, "other"),
    ApiKey.of(ADMIN_KEY, Scope.ADMIN, "admin"),
)
# Timeouts are so long that a busy machine does not reach them; tests of timeouts pass shorter ones.
_PATIENCE = 50.0
_LIMITS = {
    "max_body_size": 1_048_576,
    "body_timeout": _PATIENCE,
    "keepalive_interval": _PATIENCE,
}


@dataclass
class Gateway:
    """Running server and a client for it."""

    port: int
    session: aiohttp.ClientSession
    generator: FakeGenerator
    models: FakeModels
    drain: Drain
    metrics: GatewayMetrics
    app: web.Application
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Return the status, the parsed body and the headers. A `body` of bytes is sent unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json", **self.headers, **headers}
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=all_headers) as response:
            assert response.content_type == "application/json"
            return response.status, orjson.loads(await response.read()), response.headers

    async def chat(self, **fields: Any) -> tuple[int, Any, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, **fields: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "hi", **fields})

    async def stream_raw(self, path: str, body: dict[str, Any]) -> bytes:
        """Return all bytes of an event stream."""
        async with self.session.post(self.url + path, json={**body, "stream": True}, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return await response.read()

    async def stream_chat(self, **fields: Any) -> list[Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return parse_events(await self.stream_raw("/v1/chat/completions", body))

    async def stream_complete(self, **fields: Any) -> list[Any]:
        return parse_events(await self.stream_raw("/v1/completions", {"model": MODEL, "prompt": "hi", **fields}))

    async def get(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        async with self.session.get(self.url + path, headers={**self.headers, **headers}) as response:
            return response.status, await response.read(), response.headers

    async def raw(self, data: bytes, *, timeout: float = 40.0) -> bytes:
        """Send bytes on a new connection and read until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(timeout):
                await writer.drain()
                return await reader.read()
        finally:
            writer.close()

    async def generations_left(self) -> int:
        """Return the number of live generations, after those that are ending have ended."""
        for _ in range(4000):
            if not self.generator.live:
                break
            await asyncio.sleep(0.005)
        return len(self.generator.live)


def parse_events(raw: bytes) -> list[Any]:
    """Return the parsed data of each event, without comments; the end marker stays a string."""
    assert raw.endswith(b"\n\n")
    events: list[Any] = []
    for block in raw.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else orjson.loads(data))
    return events


def parse_named_events(raw: bytes) -> list[Any]:
    """Return the parsed data of each event, without comments; the name of an event is the type in its data."""
    events: list[Any] = []
    for block in raw.decode().split("\n\n")[:-1]:
        if not block.startswith(":"):
            name, data = block.split("\n")
            events.append(orjson.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def assembled(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assemble the choices of a chat stream in the shape of those of a whole response.

    Check the rules for deltas (reports 14, 26, 27): the role, and the id, type and name of a call are sent once, and no
    field is null.
    """
    choices: dict[int, dict[str, Any]] = {}
    for news in (news for chunk in chunks for news in chunk["choices"]):
        delta = news["delta"]
        if (choice := choices.get(news["index"])) is None:
            assert delta == {"role": "assistant", "content": ""}
            message = {"role": "assistant", "content": "", "refusal": None}
            choices[news["index"]] = {"index": news["index"], "message": message, "finish_reason": None}
            continue
        assert "role" not in delta and None not in delta.values() and choice["finish_reason"] is None
        message = choice["message"]
        for name in delta.keys() & {"content", "reasoning", "reasoning_content"}:
            message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            _add_to_calls(message.setdefault("tool_calls", []), call)
        choice["finish_reason"] = news["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def _add_to_calls(calls: list[dict[str, Any]], news: dict[str, Any]) -> None:
    function = news["function"]
    if news["index"] == len(calls):
        assert set(news) == {"index", "id", "type", "function"} and function["arguments"] == ""
        calls.append({"id": news["id"], "type": news["type"], "function": {**function}})
    else:
        assert set(news) == {"index", "function"} and set(function) == {"arguments"} and function["arguments"]
        calls[news["index"]]["function"]["arguments"] += function["arguments"]


@asynccontextmanager
async def run_gateway(
    generator: FakeGenerator | None = None,
    models: FakeModels | None = None,
    *,
    keys: bool = False,
    check_host: bool = False,
    cors_origins: Iterable[str] = (),
    extra_routes: Iterable[Route] = (),
    max_requests: int = 64,
    header_timeout: float = _PATIENCE,
    write_timeout: float = _PATIENCE,
    max_header_size: int = 16_384,
    max_connections: int = 10_000,
    responses: ResponseStore | None = None,
    streams: StreamStore | None = None,
    workers: CollectorRegistry | None = None,
    gateway_index: int = 0,
    relay: Siblings | None = None,
    **limits: Any,
) -> AsyncIterator[Gateway]:
    """Run a gateway; with `keys` it accepts USER_KEY, OTHER_KEY and ADMIN_KEY."""
    generator = generator or FakeGenerator()
    models = models or FakeModels()
    registry = CollectorRegistry()
    services = Services(
        models=models,
        generator=generator,
        key_ring=KeyRing(_RING if keys else ()),
        salts=Salts(b"secret", shared=False),
        grammars=GrammarChecker(),
        drain=Drain(max_requests),
        metrics=GatewayMetrics(registry),
        exposition=partial(render_metrics, registry, workers or CollectorRegistry()),
        responses=ResponseStore(max_bytes=1 << 24, time_to_live=3600.0) if responses is None else responses,
        streams=StreamStore(max_bytes=1 << 24, grace=_PATIENCE) if streams is None else streams,
        gateway_index=gateway_index,
        relay=relay,
        **{**_LIMITS, **limits},
    )
    routes = (*ROUTES, *extra_routes)
    app = build_app(services, check_host=check_host, cors_origins=cors_origins, routes=routes)
    runner = HttpRunner(
        app,
        max_header_size=max_header_size,
        header_timeout=header_timeout,
        write_timeout=write_timeout,
        max_connections=max_connections,
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            port = runner.addresses[0][1]
            yield Gateway(port, session, generator, models, services.drain, services.metrics, app)
    finally:
        await runner.cleanup()
        await services.grammars.close()
