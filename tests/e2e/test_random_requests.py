"""Random requests with valid parameters to the default model: each is answered, or refused by parameter name."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import orjson
import pytest

from tests.e2e.server import Server
from tests.fakes.http_gateway import parse_events

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
NUM_REQUESTS = 56
NUM_AT_A_TIME = 16
CONFLICT = "leave no token that may come next"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}

COMMON: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 2], "top_p": [0.5, 0.01], "top_k": [0, 1, 5, -1, 100_000], "min_p": [0.1, 1],
    "repetition_penalty": [1.3, 0.5, 100], "presence_penalty": [2, -2], "frequency_penalty": [2, -2],
    "logit_bias": [{"5": 100}, {"2": -100}], "min_tokens": [1, 5], "ignore_eos": [True],
    "stop": ["a", ["e", "the"]], "stop_token_ids": [[1, 2, 3], [260]], "include_stop_str_in_output": [True],
    "stop_regex": ["[a-z]{4}", "."], "skip_special_tokens": [False], "seed": [1, -5], "n": [2, 3],
    "stream": [True], "priority": [-1, 5], "cache_salt": ["x"], "max_tokens": [1, 2],
    "response_format": [
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ],
    "structured_outputs": [
        {"regex": "[ab]{1,5}"}, {"choice": ["yes", "no"]}, {"grammar": 'root ::= "x" [0-9]+'}, {"json": SCHEMA},
    ],
    "typical_p": [0.1, 0.9], "top_n_sigma": [0.5, 2], "xtc_probability": [0.5, 1], "xtc_threshold": [0, 0.5],
    "dynatemp_range": [0.5], "dynatemp_exponent": [0.01, 10], "mirostat": [1, 2], "mirostat_tau": [0.1, 20],
    "mirostat_eta": [1, 0.01], "dry_multiplier": [1, 100], "dry_base": [1, 10], "dry_allowed_length": [1, 5],
    "dry_penalty_last_n": [0, -1, 10], "dry_sequence_breakers": [[], ["\n"]], "bad_words": [["the"], ["a", "."]],
    "allowed_token_ids": [list(range(300, 400)), [2]],
    "repetition_detection": [{"max_pattern_size": 1, "min_count": 2}], "truncate_prompt_tokens": [1, 5, -1],
    "prompt_logprobs": [0, 3], "return_token_ids": [True], "return_tokens_as_token_ids": [True],
    "use_beam_search": [True],
}  # fmt: skip
CHAT: dict[str, list[Any]] = {
    "logprobs": [True], "top_logprobs": [0, 20], "tools": [[TOOL]], "tool_choice": ["auto", "required", "none", NAMED],
    "parallel_tool_calls": [False], "max_completion_tokens": [3],
}  # fmt: skip
COMPLETIONS: dict[str, list[Any]] = {"logprobs": [0, 5], "echo": [True], "best_of": [2, 3]}
CONVERSATIONS = ["Hi", "Say the same again and again.", "x " * 100]
PROMPTS = ["Hi", ["a", "b c d"], [1, 2, 3], "the the the the " * 10]


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 8}
    if rng.random() < 0.6:
        path, options = "/chat/completions", {**COMMON, **CHAT}
        body["messages"] = [{"role": "user", "content": rng.choice(CONVERSATIONS)}]
    else:
        path, options = "/completions", {**COMMON, **COMPLETIONS}
        body["prompt"] = rng.choice(PROMPTS)
    for name in rng.sample(list(options), k=rng.randint(1, 8)):
        body[name] = rng.choice(options[name])
    if "top_logprobs" in body:
        body["logprobs"] = True
    if "tool_choice" in body or "parallel_tool_calls" in body:
        body["tools"] = [TOOL]
    return path, body


def check_logprobs(logprobs: dict[str, Any] | None, *, echo: bool) -> None:
    """Check that each value is a number; only the first token of an echoed prompt has null."""
    if logprobs is None:
        return
    if "content" in logprobs:
        values = [entry["logprob"] for entry in logprobs["content"] or []]
    else:
        values = logprobs["token_logprobs"][1 if echo else 0 :]
    assert all(isinstance(value, float) and value <= 0 for value in values), values


def check(status: int, raw: bytes, body: dict[str, Any]) -> bool:
    """Fail the test on an invalid answer; return True if the request was served."""
    assert status in (200, 400), (body, raw)
    if status == 400 or not body.get("stream"):
        # orjson, unlike json, refuses NaN and Infinity. Inside a string they are model output.
        events = [orjson.loads(raw)]
    else:
        *events, done = parse_events(raw)
        assert done == "[DONE]"
    errors = [event["error"] for event in events if "error" in event]
    if errors:
        assert "Traceback" not in str(errors)
        # The parameters may exclude every token, which only the worker can detect.
        assert errors[-1]["param"] or errors[-1]["message"].endswith(CONFLICT), (body, errors)
        return False
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    for event in events:
        for choice in event["choices"]:
            check_logprobs(choice.get("logprobs"), echo=body.get("echo", False))
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) and body["prompt"][0] == "a" else 1
    assert len(reasons) == body.get("n", 1) * num_prompts
    assert set(reasons) <= {"stop", "length", "tool_calls", "repetition"}, (body, reasons)
    return True


async def test_random_requests(server: Server) -> None:
    rng = random.Random(3)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    turn = asyncio.Semaphore(NUM_AT_A_TIME)
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer none"}) as session:

        async def ask(path: str, body: dict[str, Any]) -> bool:
            async with turn, session.post(server.base_url + path, json=body) as response:
                return check(response.status, await response.read(), body)

        answered = await asyncio.gather(*(ask(path, body) for path, body in requests))
    assert sum(answered) > NUM_REQUESTS / 2
    await asyncio.to_thread(server.await_idle)
    assert "Traceback" not in server.log() and '"level":"error"' not in server.log()
