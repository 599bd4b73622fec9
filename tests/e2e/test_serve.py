"""The default model with the real processes: typical requests, log probabilities, limits and disconnects."""

from __future__ import annotations

import http.client
import json
import math
import time
from typing import Any

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def complete(server: Server, path: str = "/v1/completions", **fields: Any) -> Any:
    status, answer = server.request("POST", path, {"model": MODEL, **fields}, api_key="none")
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}])
def test_sdk_streams_the_text_of_the_whole_answer(server: Server, sampling: dict[str, Any]) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": QUESTION, "max_tokens": 40}
        options |= sampling
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        whole = client.chat.completions.create(**options).choices[0]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.message.content
    assert "seed" in sampling or "Paris" in text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.finish_reason]
    usage = chunks[-1].usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_seeds_decide_and_choices_differ(server: Server) -> None:
    """reliability 2.4 #55"""
    options = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0}
    first, again = (complete(server, **options, seed=42, n=3)["choices"] for _ in range(2))
    other = complete(server, **options, seed=43)["choices"]
    texts = [choice["text"] for choice in first]
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert texts == [choice["text"] for choice in again]
    assert len({*texts, other[0]["text"]}) == 4


def test_an_echoed_prompt_has_raw_log_probabilities(server: Server) -> None:
    """reliability 2.4 #45, 2.4 #50: they are finite and independent of top_k; the first token has none."""
    prompt = "correct horse battery staple"
    answer = complete(server, prompt=prompt, echo=True, logprobs=2, max_tokens=3, top_k=1)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    first, *rest = logprobs["token_logprobs"]
    assert choice["text"].startswith(prompt) and "".join(logprobs["tokens"]) == choice["text"]
    assert first is None and logprobs["top_logprobs"][0] is None
    # With top_k=1 the log probability of the only candidate would be 0 if it were computed after filtering.
    assert all(-9999 < value < 0 for value in rest)
    assert len(logprobs["tokens"]) == answer["usage"]["total_tokens"]


def test_a_scored_text_has_the_log_probabilities_that_it_was_written_with(server: Server) -> None:
    prompt = "The three largest cities of Italy are"
    answer = complete(server, prompt=prompt, max_tokens=12, seed=5, logprobs=3, return_token_ids=True, ignore_eos=True)
    (choice,) = answer["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    (scored,) = complete(server, prompt=ids, max_tokens=0, prompt_logprobs=3, echo=True, logprobs=0)["choices"]
    assert scored["text"] == prompt + choice["text"]
    written = choice["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["token_logprobs"][-12:] == pytest.approx(written, abs=2e-3)
    for entry, token, logprob in zip(scored["prompt_logprobs"][-12:], choice["token_ids"], written, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=2e-3)
        assert 3 <= len(entry) <= 4 and sorted(one["rank"] for one in entry.values())[:3] == [1, 2, 3]
        assert (entry[str(token)]["rank"] <= 3) == (len(entry) == 3)


def test_many_log_probabilities_of_a_prompt_of_several_chunks(server: Server) -> None:
    """reliability 2.4 #53, 2.5 #60, 2.5 #62: a prompt of several steps (512 tokens each), most alternatives allowed.

    With ignore_eos, the text has exactly the requested number of tokens.
    """
    prompt = "A list of words: " + "tree house " * 270 + "tree"
    answer = complete(server, prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=20)
    (choice,) = answer["choices"]
    entries = choice["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"] > 512 and entries[0] is None
    assert all(20 <= len(entry) <= 21 for entry in entries[1:])
    values = [alternative["logprob"] for entry in entries[1:] for alternative in entry.values()]
    assert all(math.isfinite(value) and value <= 0 for value in values)
    assert choice["text"].strip() and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8


def test_beams_score_at_least_what_greedy_does(server: Server) -> None:
    fields = {"prompt": "The best way to learn is", "max_tokens": 10, "logprobs": 0, "ignore_eos": True}
    greedy = complete(server, temperature=0, **fields)["choices"][0]
    beams = complete(server, use_beam_search=True, n=4, **fields)["choices"]
    totals = [sum(one["logprobs"]["token_logprobs"]) for one in beams]
    assert totals == sorted(totals, reverse=True) and len({one["text"] for one in beams}) == 4
    assert totals[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-3
    (alone,) = complete(server, use_beam_search=True, n=1, **fields)["choices"]
    assert alone["text"] == greedy["text"]


def test_a_prefix_is_found_again_but_not_by_another_key(server: Server) -> None:
    text = " ".join(f"item {number} of the long list;" for number in range(50))
    options = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}
    usages = []
    for key in ("sk-one", "sk-one", "sk-two"):
        status, answer = server.request("POST", "/v1/completions", options, api_key=key)
        assert status == 200, answer
        usages.append(answer["usage"])
    num_prompt_tokens = usages[0]["prompt_tokens"]
    assert num_prompt_tokens > 300
    # All full pages except the one with the last prompt token, which is always computed.
    num_full = (num_prompt_tokens - 1) // 16 * 16
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, num_full, 0]


@pytest.mark.parametrize(
    ("path", "body", "numbers"),
    [
        ("completions", {"prompt": "word " * 9000, "max_tokens": 1}, ("8192",)),
        ("completions", {"prompt": "word", "max_tokens": 9000}, ("8192", "9000")),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 112_000}]}, ("8192",)),
    ],
)
def test_what_does_not_fit_is_a_client_error(server: Server, path: str, body: dict, numbers: tuple[str, ...]) -> None:
    """reliability 2.5 #59"""
    num_served = server.metric("request_success_total")
    status, answer = server.request("POST", f"/v1/{path}", {"model": MODEL, **body}, api_key="none")
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert all(number in answer["error"]["message"] for number in ("maximum context length", *numbers)), answer
    assert server.metric("request_success_total") == num_served


def test_a_storm_of_disconnects_leaves_nothing(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Tell", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    for _ in range(5):
        connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(40)]
        for connection in connections:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
        time.sleep(0.05)
        for connection in connections:
            connection.close()
    server.await_idle()
    assert complete(server, prompt="Hi", max_tokens=4)["usage"]["completion_tokens"] >= 1


def test_the_log_has_no_error_and_no_secret(server: Server) -> None:
    """The last test of this file, because it is about the requests of all others."""
    log = server.log()
    assert f"Pelton serves {MODEL} at http://127.0.0.1:{server.port}" in log
    assert "Traceback" not in log and '"level":"error"' not in log
    assert "sk-one" not in log and "horse battery" not in log
