"""Reports on limits by number (docs/reliability.md) that need many simultaneous requests."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.fakes.gateway_core import until
from tests.fakes.prepared_server import MODEL, PreparedServer

NUM_REQUESTS = 100
LIMIT = 8 + 24
"""Number of running and waiting requests."""


async def test_excess_requests_are_refused_and_others_answered():
    """reliability 2.5 #69"""
    text = "All is well. " * 4
    flags = ("--max-waiting-requests", str(LIMIT - 8))
    with PreparedServer({"hello": text}, flags=flags, max_num_seqs=8) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        outcomes: list[int] = []

        async def ask(session: aiohttp.ClientSession) -> None:
            async with session.post(server.url + "/v1/chat/completions", json=body) as response:
                answer = await response.json()
                outcomes.append(response.status)
                if response.status == 200:
                    assert answer["choices"][0]["message"]["content"] == text
                    return
                assert response.status == 429 and answer["error"]["code"] == "rate_limit_exceeded"
                assert 1 <= int(response.headers["Retry-After"]) <= 60 and response.headers["retry-after-ms"]

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            # Refused requests are answered before the admitted ones finish.
            server.worker.faults.stalled = True
            asking = [asyncio.create_task(ask(session)) for _ in range(NUM_REQUESTS)]
            await until(lambda: len(outcomes) == NUM_REQUESTS - LIMIT, 100)
            assert set(outcomes) == {429}
            server.worker.faults.stalled = False
            await asyncio.gather(*asking)
            assert outcomes[NUM_REQUESTS - LIMIT :] == [200] * LIMIT
            # Slots are free again.
            await ask(session)
            assert outcomes[-1] == 200
        assert len(server.worker.submits()) == LIMIT + 1
