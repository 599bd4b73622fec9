"""Reports on limits, lengths and log probabilities by number (docs/reliability.md), on the default model over HTTP."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"


def ask(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_log_probabilities_of_a_prompt_are_finite(server: Server) -> None:
    """reliability 2.4 #45, 2.4 #50: they come from raw logits, independent of top_k; the first token has none."""
    with server.client() as client:
        options: dict[str, Any] = {"temperature": 1, "extra_body": {"top_k": 1}, "max_tokens": 4}
        answer = client.completions.create(
            model=MODEL, prompt="correct horse battery staple", echo=True, logprobs=1, **options
        )
    (choice,) = answer.choices
    first, *rest = choice.logprobs.token_logprobs
    assert choice.text.startswith("correct horse battery staple") and first is None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(math.isfinite(value) and -9999 < value <= 0 for value in rest)
    # With top_k=1 the log probability of the only candidate would be 0 if it were computed after filtering.
    assert all(value < 0 for value in rest)


def test_many_log_probabilities_of_a_prompt_of_several_chunks(server: Server) -> None:
    """reliability 2.4 #53, 2.5 #60: a prompt of several steps (2,048 tokens each), most alternatives allowed.

    One more alternative is refused.
    """
    prompt = "A list of words: " + "tree house " * 1050 + "tree"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, answer = server.request("POST", "/v1/completions", {**body, "prompt_logprobs": 20}, api_key="none")
    assert status == 200, answer
    (choice,) = answer["choices"]
    entries = choice["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"] > 2048 and entries[0] is None
    assert all(20 <= len(entry) <= 21 for entry in entries[1:])
    values = [alternative["logprob"] for entry in entries[1:] for alternative in entry.values()]
    assert all(math.isfinite(value) and value <= 0 for value in values)
    assert choice["text"].strip() and answer["usage"]["completion_tokens"] == 4
    status, answer = server.request("POST", "/v1/completions", {**body, "prompt_logprobs": 21}, api_key="none")
    assert status == 400 and answer["error"]["param"] == "prompt_logprobs"


def test_seeds_of_chat(server: Server) -> None:
    """reliability 2.4 #55"""
    with server.client() as client:

        def say(seed: int) -> str:
            options: dict[str, Any] = {"temperature": 0.7, "max_tokens": 24, "messages": ask("Tell me a story.")}
            return client.chat.completions.create(model=MODEL, seed=seed, **options).choices[0].message.content or ""

        with ThreadPoolExecutor(8) as pool:
            first, again, *others = pool.map(say, (42, 42, 1, 2, 3, 4, 5))
    assert first == again and len({first, *others}) == 6


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_ignore_eos_gives_the_full_length(server: Server, path: str) -> None:
    """reliability 2.5 #62: the text has exactly the requested number of tokens."""
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 48}
    ignoring = {"extra_body": {"ignore_eos": True}}
    with server.client() as client:
        if path == "chat":
            options["messages"] = ask("What is the capital of France?")
            free = client.chat.completions.create(**options)
            assert free.choices[0].finish_reason == "stop" and free.usage.completion_tokens < 48
            answer: Any = client.chat.completions.create(**options, **ignoring)
        else:
            answer = client.completions.create(prompt="<|im_start|>user\nHi<|im_end|>\n", **options, **ignoring)
    assert answer.usage.completion_tokens == 48 and answer.choices[0].finish_reason == "length"


def test_a_prompt_far_too_long_is_a_client_error(server: Server) -> None:
    """reliability 2.5 #59"""
    before = server.metric("request_success_total")
    with server.client() as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=ask("word " * 112_000))
    assert error.value.code == "context_length_exceeded" and "8192" in error.value.message
    assert "Traceback" not in server.log() and '"level":"error"' not in server.log()
    assert server.metric("request_success_total") == before


def test_two_systems_and_two_users_in_a_row(server: Server) -> None:
    """reliability 2.5 #64, 2.5 #67: no status 500; an empty system message counts as none."""
    user = {"role": "user", "content": "Hi."}
    for messages in (
        [user, user],
        [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, user],
        [user, {"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": ""}, user],
        [{"role": "assistant", "content": "Hm."}, user],
    ):
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        status, answer = server.request("POST", "/v1/chat/completions", body, api_key="none")
        assert status == 200 or (status == 400 and answer["error"]["param"].startswith("messages")), answer


def test_after_all_that_nothing_is_held(server: Server) -> None:
    server.await_idle()
    assert "Traceback" not in server.log()
