"""Requests with different sampling methods, grammars, log probabilities and prefix hits in one batch (F29)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
PREFIX = "You are a careful clerk who writes short notes about parcels, trains and the weather of the day. " * 3
MAX_TOKENS = 10
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}, "number": {"type": "integer"}}}
REPEATING = {"role": "user", "content": "Write the same word again and again."}

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2, "temperature": 1.5},
    "typical_p": {"typical_p": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.0, "temperature": 2.0},
    "xtc": {"xtc_probability": 0.9, "xtc_threshold": 0.05},
    "dynatemp": {"dynatemp_range": 0.8, "dynatemp_exponent": 1.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_eta": 0.3},
    "dry": {"temperature": 0, "dry_multiplier": 2.0, "dry_sequence_breakers": [], "messages": [REPEATING]},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": -0.3},
    "logit_bias": {"logit_bias": {"30": 8.0, "28": -100.0}},
    "bad_words": {"temperature": 0, "bad_words": ["the", "parcel", "train"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(200, 400))},
    "min_tokens": {"min_tokens": 10, "temperature": 0},
    "ignore_eos": {"ignore_eos": True, "seed": 9},
    "stop": {"stop": [" the", "."], "seed": 12},
    "stop_regex": {"stop_regex": "[aeiou]{2}", "seed": 13},
    "stop_token_ids": {"stop_token_ids": list(range(260, 290)), "seed": 14},
    "repetition_detection": {
        "temperature": 0,
        "messages": [REPEATING],
        "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
    },
    "logprobs": {"logprobs": True, "top_logprobs": 20},
    "two choices": {"n": 2, "logprobs": True},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "json": {"response_format": {"type": "json_object"}, "logprobs": True},
    "regex": {"structured_outputs": {"regex": "[A-F]{3,30}[0-9]"}, "top_k": 3},
    "choice": {"structured_outputs": {"choice": ["parcels", "trains", "weather"]}, "presence_penalty": 1.0},
    "tools": {"tools": [TOOL], "tool_choice": "required", "frequency_penalty": 0.5},
    "thinking aside": {"structured_outputs": {"regex": "[a-z ]+"}, "min_p": 0.1, "xtc_probability": 0.5},
}


def request(index: int, name: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": f"Note {index % 5}, please."}]
    return {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "seed": index, **OPTIONS[name]}


async def answer(client: openai.AsyncOpenAI, body: dict[str, Any], delay: float = 0.0) -> list[dict[str, Any]]:
    """Return the parts of each choice that must not depend on the batch; ids of calls are random."""
    await asyncio.sleep(delay)
    response: Any = await client.post("/chat/completions", cast_to=object, body=body)
    choices = []
    for choice in response["choices"]:
        message = choice["message"]
        content = (choice.get("logprobs") or {}).get("content") or []
        choices.append(
            {
                "text": message["content"],
                "calls": [call["function"] for call in message.get("tool_calls") or []],
                "finish": choice["finish_reason"],
                "tokens": [token["token"] for token in content],
                "logprobs": [token["logprob"] for token in content],
                "alternatives": [[other["token"] for other in token["top_logprobs"]] for token in content],
            }
        )
    return choices


async def test_each_of_a_mixed_batch_equals_its_solo_run(server: Server) -> None:
    """CVE-2026-44223, F29. With drafts in every step, see the exactness tests of tests/unit/worker."""
    rng = random.Random(7)
    bodies = {name: request(index, name) for index, name in enumerate(OPTIONS)}
    async with server.async_client() as client:
        alone = {name: await answer(client, body) for name, body in bodies.items()}
        await asyncio.to_thread(server.await_report)
        hits = server.metric("prefix_cache_hits_total")
        batches = [
            await asyncio.gather(*(answer(client, body) for body in bodies.values())),
            await asyncio.gather(*(answer(client, body, rng.random()) for body in reversed(bodies.values()))),
        ]
    await asyncio.to_thread(server.await_idle)
    assert server.metric("prefix_cache_hits_total") > hits
    for names, batch in zip((list(bodies), list(reversed(bodies))), batches, strict=True):
        for name, choices in zip(names, batch, strict=True):
            for choice, expected in zip(choices, alone[name], strict=True):
                assert choice["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3), name
                assert {**choice, "logprobs": 0} == {**expected, "logprobs": 0}, name
    # Some parameters leave a greedy answer unchanged; if most had no effect, the equality would prove nothing.
    assert len({str(choices) for choices in alone.values()}) > len(OPTIONS) - 6
