"""Pages of another origin as clients in a browser: `fetch` for POST streams, `EventSource` for stored streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from gateway.flow.events import TextDelta
from tests.fakes.fake_generator import MODEL, FakeGenerator, Step, spell
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import USER_KEY, run_gateway

TEXT = "Grüße \u2028 aus \U0001f600!"
CLIENT = (Path(__file__).parents[1] / "fakes" / "browser_client.js").read_text("utf-8")


@asynccontextmanager
async def serving(handler) -> AsyncIterator[str]:
    """Serve `handler` and yield its origin."""
    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def empty_page(request):
    return web.Response(text="<!doctype html><link rel=icon href='data:,'>", content_type="text/html")


async def test_fetch_reads_the_stream_of_a_post(page):
    async with (
        serving(empty_page) as origin,
        run_gateway(FakeGenerator(spell(TEXT)), cors_origins=[origin], keys=True) as gateway,
    ):
        await page.open(origin)
        await page.run(CLIENT)
        found = await page.run(f"read('{gateway.url}', {{key: '{USER_KEY}'}})")
        assert found["text"] == TEXT and found["done"] and found["status"] == 200
        assert found["id"] == "page-1", "headers of its own go there, and those of the answer may be read"
        # An error is one that the page can read, too.
        refused = await page.run(f"""fetch("{gateway.url}/v1/models").then(
            async response => [response.status, (await response.json()).error.code])""")
        assert refused == [401, "invalid_api_key"]
        assert [problem for problem in page.problems if "401 (Unauthorized)" not in problem] == []


async def test_fetch_that_is_aborted_ends_the_generation(page):
    steps: list[Step] = [TextDelta(0, "Endless", [1]), asyncio.Event()]
    async with (
        serving(empty_page) as origin,
        run_gateway(FakeGenerator(lambda _: steps), cors_origins=[origin]) as gateway,
    ):
        await page.open(origin)
        await page.run(CLIENT)
        name = await page.run(f"""(() => {{
            const stopping = new AbortController();
            const seen = ({{text}}) => text && stopping.abort();
            return read("{gateway.url}", {{seen, signal: stopping.signal}}).catch(error => error.name);
        }})()""")
        assert name == "AbortError"
        await until(lambda: not gateway.generator.live)
        assert gateway.generator.generations[0].cancelled and page.problems == []


async def test_event_source_resumes_and_stops_at_the_end(page):
    """The browser reconnects with the last event's number after a broken connection, and a 204 at the end stops it."""
    asked: list[str | None] = []
    gate = asyncio.Event()
    deltas = [TextDelta(0, character, [1]) for character in "abcdef"]
    steps: list[Step] = [*deltas[:3], gate, *deltas[3:], TextDelta(0, "", [2], finish_reason="stop")]

    async def cutting(request):
        """Proxy: request a short reconnection time, and cut the first connection after the third event."""
        asked.append(request.headers.get("Last-Event-ID"))
        headers = {name: request.headers[name] for name in ("Origin", "Last-Event-ID") if name in request.headers}
        url = gateway.url + request.path_qs
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as upstream:
            kept = ("Content-Type", "Access-Control-Allow-Origin")
            response = web.StreamResponse(
                status=upstream.status,
                headers={name: upstream.headers[name] for name in kept if name in upstream.headers},
            )
            await response.prepare(request)
            if upstream.status == 204:
                return response
            await response.write(b"retry: 20\n\n")
            number = 0
            while event := await upstream.content.readuntil(b"\n\n"):
                await response.write(event)
                number += 1
                if len(asked) == 1 and number == 3:
                    request.transport.abort()
                    gate.set()
                    return response
            return response

    async with (
        serving(empty_page) as origin,
        serving(cutting) as between,
        run_gateway(FakeGenerator(lambda _: steps), cors_origins=[origin]) as gateway,
    ):
        await page.open(origin)
        await page.run(CLIENT)
        # The page learns the id and loses the connection of its POST.
        stream = await page.run(f"""(async () => {{
            const stopping = new AbortController();
            let stream;
            const seen = found => {{ stream = found.stream; stopping.abort(); }};
            const options = {{seen, signal: stopping.signal, stream_options: {{resumable: true}}}};
            await read("{gateway.url}", options).catch(() => 0);
            return stream;
        }})()""")
        found = await page.run(f"follow('{between}/v1/streams/{stream}')")
        assert found["text"] == "abcdef" and found["done"] and found["ids"] == list(range(1, len(found["ids"]) + 1))
        assert asked == [None, "3", str(found["ids"][-1])] and found["errors"] == 3
        # Also without the proxy: from the start, then a 204.
        direct = await page.run(f"""(() => {{
            const source = new EventSource("{gateway.url}/v1/streams/{stream}");
            return new Promise(resolve => {{ source.onmessage = ({{data, lastEventId}}) => {{
                if (data === "[DONE]") {{ source.close(); resolve(lastEventId); }}
            }}; }});
        }})()""")
        assert direct == asked[-1]


async def test_a_page_of_another_origin_gets_nothing(page):
    async with (
        serving(empty_page) as origin,
        run_gateway(FakeGenerator(spell(TEXT)), cors_origins=["https://page.example"]) as gateway,
    ):
        await page.open(origin)
        await page.run(CLIENT)
        assert await page.run(f"read('{gateway.url}').catch(error => error.name)") == "TypeError"
        assert not gateway.generator.requests, "the preflight keeps it from being asked for at all"
        # An existing stream whose id the page knows.
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream_options": {"resumable": True}}
        [stream] = set(re.findall(r"chatcmpl-\w+", (await gateway.stream_raw("/v1/chat/completions", body)).decode()))
        found = await page.run(f"follow('{gateway.url}/v1/streams/{stream}')")
        assert found["text"] == "" and found["ids"] == []
        await until(lambda: any("Access-Control-Allow-Origin" in problem for problem in page.problems))
