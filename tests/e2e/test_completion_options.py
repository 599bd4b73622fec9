"""Parameters of completions on the default model, checked for consistency with other responses of the model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"


def complete(server: Server, path: str = "/v1/completions", **fields: Any) -> Any:
    status, answer = server.request("POST", path, {"model": MODEL, **fields}, api_key="none")
    assert status == 200, answer
    return answer


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


def test_best_of_returns_the_likeliest_choices(server: Server) -> None:
    fields = {"prompt": "My favourite food is", "max_tokens": 8, "seed": 9, "logprobs": 0, "ignore_eos": True}
    every = complete(server, n=5, **fields)["choices"]
    best = complete(server, n=2, best_of=5, **fields)
    scores = [sum(one["logprobs"]["token_logprobs"]) / 8 for one in every]
    order = sorted(range(5), key=scores.__getitem__, reverse=True)
    assert [one["text"] for one in best["choices"]] == [every[index]["text"] for index in order[:2]]
    assert best["usage"]["completion_tokens"] == 40


def test_truncation_gives_what_the_shorter_prompt_gives(server: Server) -> None:
    text = "one two three four five six seven eight nine ten"
    ids = complete(server, prompt=text, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        fields = {"max_tokens": 6, "temperature": 0}
        cut = complete(
            server, prompt=text, truncate_prompt_tokens=4, truncation_side=side, return_token_ids=True, **fields
        )
        assert cut["choices"][0]["prompt_token_ids"] == kept and cut["usage"]["prompt_tokens"] == 4
        assert cut["choices"][0]["text"] == complete(server, prompt=kept, **fields)["choices"][0]["text"]


@pytest.mark.parametrize("expression", [r"\d", r"[.!?]\s", r"(?m)^\W*\w+:?$", r"\b[A-Z]\w+\b"])
def test_a_stop_expression_cuts_the_text_that_would_have_come(server: Server, expression: str) -> None:
    fields = {"prompt": "Facts about France:\n", "max_tokens": 40, "temperature": 0}
    whole = complete(server, **fields)["choices"][0]
    cut = complete(server, stop_regex=expression, **fields)["choices"][0]
    # The rule: of all matches, the one that ends first; among those, the one that starts first.
    ends = {
        (end, start)
        for end in range(1, len(whole["text"]) + 1)
        for found in [re.compile(rf"(?:{expression.removeprefix('(?m)')})(?<=\A[\s\S]{{{end}}})", re.MULTILINE)]
        for start in range(end)
        if found.match(whole["text"], start)
    }
    if not ends:
        assert cut == whole
    else:
        assert cut["text"] == whole["text"][: min(ends)[1]] and cut["finish_reason"] == "stop"


def test_beams_score_at_least_what_greedy_does(server: Server) -> None:
    fields = {"prompt": "The best way to learn is", "max_tokens": 10, "logprobs": 0, "ignore_eos": True}
    greedy = complete(server, temperature=0, **fields)["choices"][0]
    beams = complete(server, use_beam_search=True, n=4, **fields)["choices"]
    totals = [sum(one["logprobs"]["token_logprobs"]) for one in beams]
    assert totals == sorted(totals, reverse=True) and len({one["text"] for one in beams}) == 4
    assert totals[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-3
    (alone,) = complete(server, use_beam_search=True, n=1, **fields)["choices"]
    assert alone["text"] == greedy["text"]
    chat = complete(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], use_beam_search=True, n=2,
        max_tokens=8,
    )  # fmt: skip
    assert len(chat["choices"]) == 2
    server.await_idle()


def test_words_that_must_not_be(server: Server) -> None:
    fields = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    assert "Paris" in complete(server, **fields)["choices"][0]["text"]
    assert "Paris" not in complete(server, bad_words=["Paris"], **fields)["choices"][0]["text"]
