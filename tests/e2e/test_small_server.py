"""A server with small limits: names and sizes, a cache too small for its load, and a gateway that is killed."""

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

MODEL = "first"
MAX_MODEL_LEN = 140
BLOCK_SIZE = 8
STEP = 64


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """144 tokens of cache, enough for two and a half of the streams below."""
    flags = f"--served-model-name {MODEL} --served-model-name second --max-model-len {MAX_MODEL_LEN} --num-kv-pages 18 "
    flags += f"--block-size {BLOCK_SIZE} --max-num-seqs 8 --max-num-batched-tokens {STEP} --dtype float32 "
    flags += "--pooling mean --api-key none --api-key other --shared-prefix-cache"
    with Server(tuple(flags.split())) as running:
        yield running


def _complete(server: Server, model: str = MODEL, key: str = "none", **fields: Any) -> tuple[int, Any]:
    return server.request("POST", "/v1/completions", {"model": model, **fields}, api_key=key)


def _request(index: int) -> dict[str, Any]:
    sampling = {"temperature": 0} if index % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": index}
    options = {"model": MODEL, "prompt": f"The story number {index} is about", "max_tokens": 48, **sampling}
    return {**options, "stream": True, "extra_body": {"ignore_eos": True}}


async def _text(client: openai.AsyncOpenAI, index: int) -> str:
    stream = await client.completions.create(**_request(index))
    return "".join([chunk.choices[0].text async for chunk in stream])


async def _vectors(client: openai.AsyncOpenAI, inputs: Any, **fields: Any) -> np.ndarray:
    answer = await client.embeddings.create(model=MODEL, input=inputs, encoding_format="float", extra_body=fields)
    return np.array([one.embedding for one in answer.data])


def _num_preemptions(server: Server) -> float:
    server.await_report()
    return server.metric("num_preemptions_total")


def test_names_sizes_and_a_shared_cache(small: Server) -> None:
    status, models = small.request("GET", "/v1/models", api_key="none")
    assert status == 200
    expected = [(name, MAX_MODEL_LEN) for name in (MODEL, "second")]
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == expected
    assert small.metric("kv_cache_num_pages") == 18
    small.await_report()
    num_steps = small.metric("engine_steps_total")
    fields = {"prompt": "a long list of items, " * 16, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, cold = _complete(small, **fields)
    assert status == 200, cold
    num_prompt_tokens = cold["usage"]["prompt_tokens"]
    assert STEP < num_prompt_tokens < 2 * STEP
    # The prompt takes two steps, the second of which samples the first token.
    wait_until(lambda: small.metric("engine_steps_total") >= num_steps + 5, 60, "the worker's report")
    assert small.metric("engine_steps_total") == num_steps + 5
    status, warm = _complete(small, "second", "other", **fields)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)]
    assert cached == [0, (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE]
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    status, answer = _complete(small, "third", prompt="a")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = _complete(small, prompt="word " * 100, max_tokens=120)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "140" in answer["error"]["message"] and "221" in answer["error"]["message"]


async def test_embeddings_fill_the_context_and_have_the_pooling_of_the_worker(small: Server) -> None:
    ids = list(range(100, 100 + MAX_MODEL_LEN))
    async with small.async_client() as client:
        both = await _vectors(client, [ids, ids[:5]])
        np.testing.assert_allclose(both, await _vectors(client, [ids, ids[:5]], pooling="mean"), atol=1e-4)
        last = await _vectors(client, [ids, ids[:5]], pooling="last")
        assert np.abs(both - last).max(axis=1).min() > 0.01
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]") as refused:
            await _vectors(client, [[5], [*ids, 5]])
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input[1]"


async def test_preempted_requests_give_the_same_texts_and_vectors(small: Server) -> None:
    """F15, 91: no text is lost or sent twice, and vectors do not depend on what runs beside them."""
    prompts = [str(_request(index)["prompt"]) + " a dog" * 20 * (index % 3) for index in range(6)]
    async with small.async_client() as client:
        before = await asyncio.to_thread(_num_preemptions, small)
        texts = [await _text(client, index) for index in range(3)]
        alone = {
            pooling: np.concatenate([await _vectors(client, one, pooling=pooling) for one in prompts])
            for pooling in ("last", "mean")
        }
        assert await asyncio.to_thread(_num_preemptions, small) == before
        # Each prompt twice, so that three requests run at a time however late they arrive.
        together = await asyncio.gather(
            *(_vectors(client, prompts, pooling=pooling) for pooling in alone for _ in range(2)),
            *(_text(client, index % 3) for index in range(6)),
        )
    assert together[4:] == [*texts, *texts]
    for expected, found in zip([one for one in alone.values() for _ in range(2)], together[:4], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert await asyncio.to_thread(_num_preemptions, small) > before
    await asyncio.to_thread(small.await_idle)


def test_beams_that_do_not_fit_the_cache_are_those_of_a_large_one(small: Server, server: Server) -> None:
    """Eight beams of 50 tokens run in groups, which recompute what was evicted."""
    fields = {"prompt": "The best way to learn is", "max_tokens": 48, "ignore_eos": True, "return_token_ids": True}
    found = []
    for running, model in ((small, MODEL), (server, "SmolLM2-135M-Instruct")):
        status, answer = _complete(running, model, use_beam_search=True, n=8, **fields)
        assert status == 200, answer
        found.append([choice["token_ids"] for choice in answer["choices"]])
    assert found[0] == found[1] and len(found[0]) == 8
    small.await_idle()


async def _is_broken(client: openai.AsyncOpenAI, index: int, started: asyncio.Event) -> bool:
    """Return True if the stream broke before its end."""
    try:
        async for _ in await client.completions.create(**_request(index) | {"max_tokens": 96}):
            started.set()
    # openai.APIConnectionError before the headers, httpx's own errors after them.
    except (openai.APIConnectionError, httpx.TransportError):
        return True
    finally:
        started.set()
    return False


async def test_a_killed_gateway_leaves_no_work_behind(small: Server) -> None:
    """F6: the worker drops the requests of the dead gateway and serves the next one."""
    workers, gateways = small.worker_pids(), small.gateway_pids()
    async with small.async_client() as client:
        started = asyncio.Event()
        # Few run at a time and the others wait, so seconds lie between the first and the last token.
        tasks = [asyncio.create_task(_is_broken(client, index, started)) for index in range(24)]
        await started.wait()
        os.kill(gateways[0], signal.SIGKILL)
        assert sum(await asyncio.gather(*tasks)) > 2
    await asyncio.to_thread(wait_until, lambda: small.status("/ready") == 200, 60, "ready again")
    await asyncio.to_thread(small.await_idle)
    assert small.worker_pids() == workers
    async with small.async_client() as client:
        assert await _text(client, 0)
