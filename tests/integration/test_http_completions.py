"""POST /v1/completions, /tokenize, /detokenize and /v1/models over HTTP. Numbers are cases of collected bug reports."""

from __future__ import annotations

import pytest

from gateway.api.common import chat_prompt
from gateway.flow.events import TextDelta
from shared.errors import WorkerLostError
from tests.fakes.fake_generator import MODEL, FakeEntry, FakeModels, facts, spell
from tests.fakes.http_gateway import run_gateway


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_prompt_forms(gateway, prompt, ids):
    status, body, _ = await gateway.complete(prompt=prompt)
    assert status == 200
    assert [request.prompt_token_ids for request in gateway.generator.requests] == ids
    assert [choice["index"] for choice in body["choices"]] == list(range(len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert len({request.request_id for request in gateway.generator.requests}) == len(ids)


async def test_one_failing_prompt_fails_the_request_and_cancels_the_others(gateway):
    def script(request):
        return [TextDelta(0, "x", [1]), WorkerLostError("gone") if request.prompt_token_ids == [97] else 60.0]

    gateway.generator.script = script
    status, _, _ = await gateway.complete(prompt=["a", "b"])
    assert status == 503
    assert [generation.cancelled for generation in gateway.generator.generations] == [False, True]
    events = await gateway.stream_complete(prompt=["a", "b"])
    assert events[-2]["error"]["code"] == "worker_lost" and events[-1] == "[DONE]"
    assert await gateway.generations_left() == 0


async def test_echo_with_logprobs(gateway):
    # 50
    gateway.generator.script = spell("c")
    _, body, _ = await gateway.complete(prompt="a\u20acb", echo=True, logprobs=1)
    (choice,) = body["choices"]
    assert choice["text"] == "a\u20acbc"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][5] == {"c": -0.5}
    joined: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for event in (await gateway.stream_complete(prompt="a\u20acb", echo=True, logprobs=1))[:-1]:
        text += event["choices"][0]["text"]
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert text == choice["text"] and joined == logprobs


async def test_tokenize_and_detokenize(gateway):
    _, body, _ = await gateway.post("/tokenize", {"prompt": "h\u00e9", "return_token_strs": True})
    assert body["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    messages = [{"role": "user", "content": "hi"}]
    _, body, _ = await gateway.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert bytes(body["tokens"]) == b"user: hi\n"
    assert (await gateway.post("/detokenize", {"model": MODEL, "tokens": []}))[1] == {"prompt": ""}
    both = {"prompt": "a", "messages": messages}
    for body in ({}, both, {"prompt": 1}, {"prompt": "a", "add_generation_prompt": True}):
        assert (await gateway.post("/tokenize", body))[0] == 400


@pytest.mark.parametrize(
    "tokens", [[-1], [258], [2**31], [2**63], [1.0], [True], ["1"], [None], "1", None, 1, [[1]], [1] * 5000]
)
async def test_detokenize_refuses_invalid_token_ids(gateway, tokens):
    # CVE-2026-71486
    status, body, _ = await gateway.post("/detokenize", {"model": MODEL, "tokens": tokens})
    assert status == 400 and body["error"]["param"].startswith("tokens")


async def test_ten_million_token_ids_are_refused_before_they_are_parsed():
    # CVE-2026-71486
    async with run_gateway(max_body_size=2**25) as gateway:
        raw = b'{"model":"fake-model","tokens":[' + b"1," * 10_000_000 + b"1]}"
        status, body, _ = await gateway.post("/detokenize", raw)
        assert status == 400 and body["error"]["code"] == "too_many_values"


async def test_tokenize_counts_within_bounds(monkeypatch):
    # F28: long texts wait for each other.
    monkeypatch.setattr(chat_prompt, "MAX_COUNTED_TOKENS", 100)
    monkeypatch.setattr(chat_prompt, "_CHARACTERS_PER_TOKEN", 2)
    async with run_gateway(models=FakeModels(FakeEntry(facts(max_model_len=50)))) as gateway:
        for length, expected in ((80, 200), (120, 400), (201, 413)):
            for body in ({"prompt": "a" * length}, {"messages": [{"role": "user", "content": "a" * length}]}):
                status, answer, _ = await gateway.post("/tokenize", body)
                assert status == expected, answer
                if status == 400:
                    assert [answer["error"]["param"]] == list(body)
        conversation = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 120}]}
        status, answer, _ = await gateway.post("/v1/messages/count_tokens", conversation)
        assert status == 400 and answer["error"]["message"].startswith("messages: The text has")
        asked = {"model": MODEL, "input": "a" * 120}
        status, answer, _ = await gateway.post("/v1/responses/input_tokens", asked)
        assert status == 400 and answer["error"]["param"] == "input"
    async with run_gateway(models=FakeModels(FakeEntry(facts(max_model_len=150)))) as gateway:
        # The model's own capacity is counted.
        assert (await gateway.post("/v1/responses/input_tokens", asked))[0] == 200
