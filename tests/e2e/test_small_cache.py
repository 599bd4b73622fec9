"""A cache too small for its load, and a gateway that dies while its worker continues."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.server import Server, wait_until

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """144 tokens of cache, enough for two and a half of the requests below."""
    with Server(("--dtype", "float32", "--num-kv-pages", "9", "--max-model-len", "140")) as running:
        yield running


def _request(index: int) -> dict[str, Any]:
    sampling = {"temperature": 0} if index % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": index}
    options = {"model": MODEL, "prompt": f"The story number {index} is about", "max_tokens": 48, **sampling}
    return {**options, "stream": True, "extra_body": {"ignore_eos": True}}


async def _text(client: openai.AsyncOpenAI, index: int) -> str:
    stream = await client.completions.create(**_request(index))
    return "".join([chunk.choices[0].text async for chunk in stream])


def _num_preemptions(server: Server) -> float:
    server.await_report()
    return server.metric("num_preemptions_total")


async def _unfinished(client: openai.AsyncOpenAI, index: int, started: asyncio.Event) -> bool:
    """Return True if the stream broke before its end."""
    try:
        async for _ in await client.completions.create(**_request(index) | {"max_tokens": 128}):
            started.set()
    # openai.APIConnectionError before the headers, httpx's own errors after them.
    except (openai.APIConnectionError, httpx.TransportError):
        return True
    finally:
        started.set()
    return False


async def test_preempted_requests_give_the_same_text(small: Server) -> None:
    """F15, 91: no text is lost or sent twice."""
    async with small.async_client() as client:
        before = await asyncio.to_thread(_num_preemptions, small)
        alone = [await _text(client, index) for index in range(3)]
        assert await asyncio.to_thread(_num_preemptions, small) == before
        # Each prompt twice, so that three requests run at a time however late they arrive.
        together = await asyncio.gather(*(_text(client, index % 3) for index in range(6)))
    assert list(together) == [*alone, *alone]
    assert await asyncio.to_thread(_num_preemptions, small) > before
    await asyncio.to_thread(small.await_idle)


async def test_preempted_embeddings_give_the_same_vectors(small: Server) -> None:
    """The vectors equal solo runs, and so do texts of concurrent streams with shared prefixes."""
    prompts = [str(_request(index)["prompt"]) + " a dog" * 20 * (index % 3) for index in range(8)]
    options: dict[str, Any] = {"model": MODEL, "encoding_format": "float"}
    async with small.async_client() as client:

        async def vectors(inputs: list[str], pooling: str) -> np.ndarray:
            answer = await client.embeddings.create(input=inputs, extra_body={"pooling": pooling}, **options)
            return np.array([one.embedding for one in answer.data])

        texts = [await _text(client, index) for index in range(3)]
        alone = {name: np.concatenate([await vectors([one], name) for one in prompts]) for name in ("last", "mean")}
        before = await asyncio.to_thread(_num_preemptions, small)
        batches = asyncio.gather(*(vectors(prompts, name) for name in alone for _ in range(2)))
        assert await asyncio.gather(*(_text(client, index) for index in range(3))) == texts
        for expected, found in zip([one for one in alone.values() for _ in range(2)], await batches, strict=True):
            np.testing.assert_allclose(found, expected, atol=2e-4)
    assert await asyncio.to_thread(_num_preemptions, small) > before
    await asyncio.to_thread(small.await_idle)


def test_what_is_larger_than_the_cache_is_refused(small: Server) -> None:
    body = {"model": MODEL, "prompt": "word " * 100, "max_tokens": 120}
    status, answer = small.request("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "140" in answer["error"]["message"] and "221" in answer["error"]["message"]


async def test_a_gateway_that_dies_leaves_no_work_behind(small: Server) -> None:
    """F6: the worker drops the requests of the dead gateway and serves the next one."""
    workers, gateways = small.worker_pids(), small.gateway_pids()
    async with small.async_client() as client:
        started = asyncio.Event()
        # One or two run at a time and the others wait, so seconds lie between the first and the last token. A gauge
        # would be   too old.
        tasks = [asyncio.create_task(_unfinished(client, index, started)) for index in range(32)]
        await started.wait()
        os.kill(gateways[0], signal.SIGKILL)
        assert sum(await asyncio.gather(*tasks)) > 2
    await asyncio.to_thread(wait_until, lambda: small.status("/ready") == 200, 60, "ready again")
    await asyncio.to_thread(small.await_idle)
    assert small.worker_pids() == workers
    async with small.async_client() as client:
        assert await _text(client, 0)
