"""Settings of the worker that a client can observe, each on a server started with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server import Server, wait_until

pytestmark = pytest.mark.timeout(300, func_only=True)

LONG = " ".join(f"item {number}," for number in range(40))


def _complete(server: Server, model: str, key: str = "none", **fields: Any) -> Any:
    body = {"model": model, "prompt": LONG, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    status, answer = server.request("POST", "/v1/completions", body, api_key=key)
    assert status == 200, answer
    return answer


def _cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_names_sizes_and_a_shared_cache() -> None:
    flags = "--served-model-name first --served-model-name second --max-model-len 512 --block-size 8 --num-kv-pages 70 "
    flags += "--max-num-seqs 3 --max-num-batched-tokens 64 --dtype float32 --kv-cache-dtype bfloat16 "
    flags += "--api-key none --api-key other --shared-prefix-cache"
    with Server(tuple(flags.split())) as server:
        status, models = server.request("GET", "/v1/models", api_key="none")
        assert status == 200
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("first", 512), ("second", 512)]
        assert server.metric("kv_cache_num_pages") == 70
        server.await_report()
        steps = server.metric("engine_steps_total")
        cold = _complete(server, "first")
        num_prompt_tokens = cold["usage"]["prompt_tokens"]
        # The prompt in chunks of 64 tokens, then one token per step.
        assert 64 < num_prompt_tokens < 500
        wait = -(-num_prompt_tokens // 64) + 3
        _wait_for_steps(server, steps + wait)
        assert server.metric("engine_steps_total") == steps + wait
        warm = _complete(server, "second", "other")
        assert _cached(cold) == 0
        assert _cached(warm) == (num_prompt_tokens - 1) // 8 * 8
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        status, answer = server.request(
            "POST", "/v1/completions", {"model": "first", "prompt": "a", "max_tokens": 600}, api_key="none"
        )
        assert status == 400 and "512" in answer["error"]["message"]
        status, answer = server.request("POST", "/v1/completions", {"model": "third", "prompt": "a"}, api_key="none")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def _wait_for_steps(server: Server, count: float) -> None:
    wait_until(lambda: server.metric("engine_steps_total") >= count, 60, "the worker's report")


def test_without_prefix_caching_nothing_is_found_again() -> None:
    options = ("--no-enable-prefix-caching", "--kv-cache-memory", "50000000", "--kv-cache-dtype", "float32")
    with Server((*options, "--api-key", "none")) as server:
        first = _complete(server, "SmolLM2-135M-Instruct")
        again = _complete(server, "SmolLM2-135M-Instruct")
        assert _cached(first) == _cached(again) == 0
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        # 30 layers x keys and values x 3 heads x 16 slots x 64 values of 4 bytes per page.
        assert server.metric("kv_cache_num_pages") == 50_000_000 // (30 * 2 * 3 * 16 * 64 * 4)
        # The context is lowered to the capacity of the pages, and the log says so.
        status, models = server.request("GET", "/v1/models", api_key="none")
        assert status == 200 and models["data"][0]["max_model_len"] == 67 * 16
