"""Completion options besides text, on completions and chat: best_of, scores, ids, truncation, beams."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.flow.events import TextDelta
from tests.fakes.fake_generator import EOS, FakeEntry, FakeModels, facts, logprob, spell
from tests.fakes.http_gateway import run_gateway


def ranked(request):
    """Return a script in which choice i yields chr(97 + i); the middle choices have the best mean log probability."""
    for choice in range(request.n):
        scores = [-1.0, -0.2, -0.5, -3.0][choice % 4]
        entries = None if request.sampling.logprobs is None else [logprob(97 + choice, scores)] * 2
        of_prompt = [logprob(1, None)] if request.sampling.prompt_logprobs is not None and choice == 0 else None
        yield TextDelta(choice, chr(97 + choice) * 2, [97 + choice] * 2, entries, prompt_logprobs=of_prompt)
    for choice in range(request.n):
        yield TextDelta(choice, "", [EOS], None if request.sampling.logprobs is None else [logprob(EOS, -0.1)], "stop")


async def test_best_of_returns_the_likeliest(gateway):
    gateway.generator.script = ranked
    status, body, _ = await gateway.complete(prompt=["x", "y"], n=2, best_of=4)
    assert status == 200
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "bb", "stop"),
        (1, "cc", "stop"),
        (2, "bb", "stop"),
        (3, "cc", "stop"),
    ]
    assert all(one["logprobs"] is None for one in body["choices"])
    # All generated tokens are counted; each prompt counts once.
    assert body["usage"]["completion_tokens"] == 2 * 4 * 3 and body["usage"]["prompt_tokens"] == 2
    assert [request.n for request in gateway.generator.requests] == [4, 4]
    assert gateway.generator.requests[0].sampling.logprobs == 0
    _, body, _ = await gateway.complete(best_of=3, logprobs=1, echo=True, prompt="p")
    assert body["choices"][0]["text"] == "pbb" and body["choices"][0]["logprobs"]["token_logprobs"] == [
        None,
        -0.2,
        -0.2,
    ]


async def test_a_prompt_is_scored_without_a_completion(gateway):
    gateway.generator.script = spell("xyz")
    for fields in ({}, {"stream": False, "n": 2}):
        status, body, _ = await gateway.complete(prompt="abc", max_tokens=0, echo=True, logprobs=1, **fields)
        assert status == 200
        for choice in body["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
            assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
        assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 3
    assert gateway.generator.requests[0].sampling.max_tokens == 1
    events = await gateway.stream_complete(prompt="abc", max_tokens=0, echo=True)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    _, body, _ = await gateway.complete(prompt="abc", max_tokens=0, prompt_logprobs=0)
    assert body["choices"][0]["text"] == "" and len(body["choices"][0]["prompt_logprobs"]) == 3
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "max_tokens"),
        ({"echo": True, "min_tokens": 1}, "min_tokens"),
        ({"echo": True, "best_of": 2}, "best_of"),
        ({"echo": True, "use_beam_search": True}, "use_beam_search"),
        ({"echo": False, "prompt_logprobs": 1, "suffix": "x"}, "suffix"),
    ]
    for wrong, param in refused:
        status, body, _ = await gateway.complete(max_tokens=0, **wrong)
        assert status == 400 and body["error"]["param"] == param
    assert (await gateway.chat(max_tokens=0))[0] == 400


async def test_prompt_logprobs_in_vllms_shape(gateway):
    # 53
    gateway.generator.script = spell("z")
    _, body, _ = await gateway.complete(prompt=["ab\u20ac", "c"], prompt_logprobs=2)
    first, *rest = body["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == 4 and body["choices"][1]["prompt_logprobs"] == [None]
    assert rest[0] == {
        "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
    }
    assert rest[1]["226"]["decoded_token"] == "bytes:\\xe2"
    _, body, _ = await gateway.complete(prompt="ab", prompt_logprobs=0)
    assert body["choices"][0]["prompt_logprobs"][1] == {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}
    # echo requests another number of alternatives: each list has its own number.
    _, body, _ = await gateway.complete(prompt="ab", prompt_logprobs=3, echo=True, logprobs=1)
    assert gateway.generator.requests[-1].sampling.prompt_logprobs == 3
    assert len(body["choices"][0]["prompt_logprobs"][1]) == 3
    assert body["choices"][0]["logprobs"]["top_logprobs"][1] == {"b": -1.0}
    _, body, _ = await gateway.chat(prompt_logprobs=1)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"] and body["prompt_logprobs"][0] is None
    assert (
        "prompt_logprobs" not in (await gateway.chat())[1]
        and "prompt_logprobs" not in (await gateway.complete())[1]["choices"][0]
    )


async def test_reports_on_long_prompts_are_shaped_beside_the_loop_and_bounded(gateway, monkeypatch):
    # 53
    gateway.generator.script = spell("z")
    text = "ab" * 1000
    expected: list[float | None] = [None] + [-1.0] * 1999
    _, body, _ = await gateway.complete(prompt=text, prompt_logprobs=1, echo=True, logprobs=0, n=2)
    for choice in body["choices"]:
        assert len(choice["prompt_logprobs"]) == 2000 and choice["prompt_logprobs"][2]["97"]["logprob"] == -1.0
        assert choice["logprobs"]["token_logprobs"] == [*expected, -0.5] and choice["text"] == text + "z"
    events = (await gateway.stream_complete(prompt=text, echo=True, logprobs=0))[:-1]
    joined = [value for event in events for value in (event["choices"][0]["logprobs"] or {}).get("token_logprobs", [])]
    assert joined == [*expected, -0.5]
    _, body, _ = await gateway.chat(messages=[{"role": "user", "content": text}], prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    monkeypatch.setattr("gateway.api.common.prepared.MAX_PROMPT_LOGPROBS", 12_000)
    for fields, param in (
        ({"prompt_logprobs": 5, "n": 2}, "prompt_logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 6}, "logprobs"),
        ({"echo": True, "logprobs": 0, "n": 7}, "logprobs"),
    ):
        status, body, _ = await gateway.complete(prompt=text, **fields)
        assert status == 400 and body["error"]["param"] == param
    assert (await gateway.complete(prompt=text, prompt_logprobs=5, n=1))[0] == 200


async def test_tokens_named_by_their_ids(gateway):
    gateway.generator.script = spell("ab")
    _, body, _ = await gateway.complete(logprobs=1, return_tokens_as_token_ids=True)
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    assert body["choices"][0]["logprobs"]["top_logprobs"][0] == {"token_id:97": -0.5}
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    _, body, _ = await gateway.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    first = body["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:97", [97])
    assert first["top_logprobs"][0]["token"] == "token_id:97"


async def test_truncation():
    models = FakeModels(FakeEntry(facts(max_model_len=64)))
    async with run_gateway(models=models) as gateway:

        async def ids(**fields):
            status, body, _ = await gateway.complete(**fields)
            assert status == 200, body
            return bytes(gateway.generator.requests[-1].prompt_token_ids), body

        text = "".join(chr(97 + index % 26) for index in range(100))
        raw = text.encode()
        assert (await ids(prompt=text, truncate_prompt_tokens=5))[0] == raw[-5:]
        assert (await ids(prompt=text, truncate_prompt_tokens=5, truncation_side="left"))[0] == raw[-5:]
        assert (await ids(prompt=text, truncate_prompt_tokens=5, truncation_side="right"))[0] == raw[:5]
        assert (await ids(prompt="abc", truncate_prompt_tokens=5))[0] == b"abc"
        assert (await ids(prompt=text, truncate_prompt_tokens=-1))[0] == raw[-48:]
        assert (await ids(prompt=text, truncate_prompt_tokens=-1, max_tokens=60))[0] == raw[-4:]
        got, body = await ids(prompt=list(raw), truncate_prompt_tokens=3, echo=True, return_token_ids=True)
        assert got == raw[-3:] and body["choices"][0]["text"] == text[-3:] + "Hello"
        assert body["usage"]["prompt_tokens"] == 3 == len(body["choices"][0]["prompt_token_ids"])
        for fields in ({"prompt": text}, {"prompt": text, "truncate_prompt_tokens": 64}, {"prompt": text * 5}):
            status, body, _ = await gateway.complete(**fields)
            assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        long = [{"role": "user", "content": text * 5}]
        assert (await gateway.chat(messages=long))[0] == 400
        status, body, _ = await gateway.chat(messages=long, truncate_prompt_tokens=20)
        assert status == 200 and bytes(gateway.generator.requests[-1].prompt_token_ids).endswith(b"assistant:")
        assert body["usage"]["prompt_tokens"] == 20


async def test_suffix_in_the_marks_of_a_family(gateway):
    status, body, _ = await gateway.complete(suffix="end")
    assert status == 400 and body["error"]["param"] == "suffix"
    # Without special tokens nothing is appended to the prompt, as the same field means on chat.
    assert (await gateway.complete(prompt="begin", suffix="", echo=True))[0] == 200
    assert bytes(gateway.generator.requests[-1].prompt_token_ids) == b"begin"
    marks = gateway.models.entry.pipeline.marks
    marks.update({"[PREFIX]": 250, "[SUFFIX]": 251})
    assert (await gateway.complete(prompt="begin", suffix=""))[0] == 200
    assert bytes(gateway.generator.requests[-1].prompt_token_ids) == b"\xfb\xfabegin"
    status, body, _ = await gateway.complete(prompt=["ab", "cd"], suffix="end", stop_token_ids=[7])
    assert status == 200 and set(gateway.generator.requests[-1].sampling.stop_token_ids) == {7, 250, 251}
    assert [bytes(one.prompt_token_ids) for one in gateway.generator.requests[-2:]] == [
        b"\xfbend\xfaab",
        b"\xfbend\xfacd",
    ]
    assert (await gateway.complete(prompt=[9999], suffix="end"))[0] == 400
    assert (await gateway.complete(suffix="end", echo=True))[1]["error"]["param"] == "echo"
    status, body, _ = await gateway.complete(suffix="end", truncate_prompt_tokens=2)
    assert status == 400 and body["error"]["param"] == "truncate_prompt_tokens"
    assert (await gateway.chat(suffix="end"))[1]["error"]["param"] == "suffix"


async def test_words_and_breakers_reach_the_request(gateway):
    for ask in (gateway.chat, gateway.complete):
        assert (await ask(bad_words=["ab"], dry_multiplier=0.8, stop_regex=["x+y", "z"], stop="q"))[0] == 200
        request = gateway.generator.requests[-1]
        assert request.sampling.bad_words == ((97, 98),)
        assert request.sampling.dry_breakers == tuple(sorted(b'\n:"*'))
        assert request.stop_regex == ("x+y", "z") and request.stop == ("q",)


async def test_tier_metadata_and_fingerprint():
    async with run_gateway() as gateway:
        for ask, stream in ((gateway.chat, gateway.stream_chat), (gateway.complete, gateway.stream_complete)):
            _, body, _ = await ask(service_tier="auto", metadata={"a": "b"}, prompt_cache_key="k")
            assert body["service_tier"] == "default" and body["metadata"] == {"a": "b"}
            assert body["system_fingerprint"].startswith("fp_") and gateway.generator.requests[-1].affinity == "k"
            chunks = (await stream(service_tier="flex", metadata={"a": "b"}))[:-1]
            assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
            assert {chunk["system_fingerprint"] for chunk in chunks} == {body["system_fingerprint"]}
            assert gateway.generator.requests[-1].priority > 0
            _, body, _ = await ask()
            assert "service_tier" not in body and "metadata" not in body
    async with run_gateway(models=FakeModels(FakeEntry(facts(model_hash="other")))) as gateway:
        assert (await gateway.chat())[1]["system_fingerprint"] != body["system_fingerprint"]


# ---- Beam search ----


def two_ways(request):
    last = request.prompt_token_ids[-1]
    ids, values = ([97, 98, EOS], [-0.7, -0.8, -5.0]) if last == 33 else ([EOS, 99, 100], [-0.1, -2.5, -9.0])
    report = logprob(ids[0])
    report = type(report)(ids[0], values[0], 1, ids, values)
    yield TextDelta(0, "", [ids[0]], [report], "length", num_cached_tokens=0)


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "best_of": 2}])
async def test_beam_search_over_http(gateway, fields):
    gateway.generator.script = two_ways
    status, body, _ = await gateway.complete(prompt="!", use_beam_search=True, logprobs=2, **fields)
    assert status == 200, body
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "stop"),
    ]
    assert body["choices"][0]["logprobs"]["tokens"] == ["a"]
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.7, "b": -0.8}]
    assert body["usage"]["completion_tokens"] == 4 and body["usage"]["prompt_tokens"] == 1
    (room,) = gateway.generator.reservations
    assert room.request.n == 2 and room.closed and not gateway.generator.live


async def test_beams_of_a_chat_and_of_several_prompts(gateway):
    gateway.generator.script = two_ways
    status, body, _ = await gateway.complete(prompt=["!", "x!"], use_beam_search=True, n=2)
    assert status == 200 and [one["text"] for one in body["choices"]] == ["a", "b", "a", "b"]
    status, body, _ = await gateway.chat(use_beam_search=True, n=2, return_token_ids=True)
    assert status == 200 and len(body["choices"]) == 2 and body["choices"][0]["token_ids"][-1] == EOS
