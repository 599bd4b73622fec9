"""Workers that die or freeze under load: affected streams end with one error, the others continue."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server import Server, wait_until

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    # The drain takes long on a slow machine.
    with Server(("--data-parallel-size", "2", "--num-threads", "1", "--drain-timeout", "150")) as running:
        wait_until(lambda: len(running.worker_pids()) == 2, 120, "two workers")
        wait_until(lambda: _num_workers(running) == 2, 120, "two workers connected")
        yield running


def _num_workers(server: Server) -> int:
    text = str(server.request("GET", "/metrics")[1])
    return sum(line.startswith("pelton:num_requests_running{") for line in text.splitlines())


async def _stream(client: openai.AsyncOpenAI, index: int, tokens: int, started: asyncio.Event) -> str:
    """Return "ok" for a complete stream, else the code of the error that ended it."""
    try:
        stream = await client.completions.create(
            model=MODEL, prompt=f"Story {index}:", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )
        reason, count = None, 0
        async for chunk in stream:
            started.set()
            reason = chunk.choices[0].finish_reason or reason
            count += 1
    except openai.APIError as error:
        return str(error.code)
    finally:
        started.set()
    return "ok" if reason == "length" else f"ended with {reason} after {count}"


async def test_a_killed_worker_ends_only_its_own_streams(pair: Server) -> None:
    victim = pair.worker_pids()[0]
    async with pair.async_client() as client:
        events = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.create_task(_stream(client, i, 200, events[i])) for i in range(8)]
        await asyncio.gather(*(event.wait() for event in events))
        os.kill(victim, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert set(results) == {"ok", "worker_lost"}, results
        assert pair.status("/ready") == 200
        wait_until(lambda: _num_workers(pair) == 2, 120, "the worker is back")
        event = asyncio.Event()
        assert await _stream(client, 9, 8, event) == "ok"
    wait_until(pair.idle, 60, "idle")


@pytest.mark.slow
async def test_frozen_workers_are_not_ready_then_lost(pair: Server) -> None:
    """The limits of time are those of production; tests/integration has the same with shorter ones."""
    async with pair.async_client() as client:
        event = asyncio.Event()
        task = asyncio.create_task(_stream(client, 0, 6000, event))
        await event.wait()
        pids = pair.worker_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(wait_until, lambda: pair.status("/ready") != 200, 60, "not ready any more")
            assert (pair.status("/ready"), pair.status("/health")) == (503, 200)
            # For a while the workers may still return.
            assert not task.done()
            assert await asyncio.wait_for(task, 60) == "worker_lost"
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: pair.status("/ready") == 200, 60, "ready again")
        assert await _stream(client, 1, 8, asyncio.Event()) == "ok"
    await asyncio.to_thread(wait_until, pair.idle, 60, "idle")


async def test_sigterm_lets_running_streams_finish(pair: Server) -> None:
    """The last test, because it ends the server."""
    async with pair.async_client() as client:
        event = asyncio.Event()
        task = asyncio.create_task(_stream(client, 0, 200, event))
        await event.wait()
        assert pair.process is not None
        pair.process.send_signal(signal.SIGTERM)
        assert await task == "ok"
    assert await asyncio.to_thread(pair.process.wait, 60) == 0
