"""`speculative` and `prediction`: accepted and refused values, and the token ids of a prediction."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.api.common.fields import ChatFields, CompletionFields, parse_fields
from gateway.api.common.options import chat_options, completion_options
from gateway.api.common.prepared import may_draft, prediction_ids
from gateway.api.common.prompts import context_limit
from gateway.flow.salt import Salts
from gateway.http.auth import Identity, Scope
from gateway.text.pipeline import TextPipeline, TextThreads
from shared.errors import InvalidRequestError
from tests.fakes.fake_generator import FakeEntry, facts
from tests.fakes.tokenizers import byte_fallback_json, make_bundle

OFF, DRAFTS = facts(), facts(speculative_method="ngram")


def chat(**body):
    return parse_fields({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}, ChatFields)


def completion(**body):
    return parse_fields({"model": "m", "prompt": "x", **body}, CompletionFields)


def predicted(content="abc", **more):
    return {"prediction": {"type": "content", "content": content, **more}}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def check_speculation(fields, at):
    return asyncio.run(prediction_ids(fields, FakeEntry(at)))


def refused(fields, at):
    with pytest.raises(InvalidRequestError) as error:
        check_speculation(fields, at)
    return error.value


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("value", "param"),
    [
        (True, "speculative"), ("off", "speculative"), ([False], "speculative"), (0, "speculative"),
        ({}, "speculative.enabled"), ({"enabled": None}, "speculative.enabled"),
        ({"enabled": 0}, "speculative.enabled"), ({"enabled": 1}, "speculative.enabled"),
        ({"enabled": "false"}, "speculative.enabled"), ({"enabled": {}}, "speculative.enabled"),
        ({"enabled": False, "method": "ngram"}, "speculative.method"),
    ],
)  # fmt: skip
def test_speculative_is_an_object_with_one_boolean(make, value, param):
    with pytest.raises(InvalidRequestError) as error:
        make(speculative=value)
    assert error.value.param == param


@pytest.mark.parametrize("make", [chat, completion])
def test_speculative_allows_or_forbids_drafts(make):
    for body, expected in (
        ({}, True),
        ({"speculative": None}, True),
        ({"speculative": {"enabled": True}}, True),
        ({"speculative": {"enabled": False}}, False),
    ):
        fields = make(**body)
        assert may_draft(fields) is expected
        check_speculation(fields, DRAFTS)
    check_speculation(make(speculative={"enabled": False}, mirostat=2), OFF)
    assert refused(make(speculative={"enabled": True}), OFF).param == "speculative"
    assert refused(make(speculative={"enabled": True}, mirostat=2), DRAFTS).param == "speculative"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("abc", "prediction"), (["abc"], "prediction"), (True, "prediction"), (1, "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"content": "abc"}, "prediction.type"),
        ({"type": 1, "content": "abc"}, "prediction.type"),
        ({"type": "text", "content": "abc"}, "prediction.type"),
        ({"type": "content", "content": "abc", "more": 1}, "prediction.more"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": {}}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": ["abc"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "text", "text": 5}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "text", "text": "", "x": 1}]}, "prediction.content[0].x"),
        ({"type": "content", "content": [*parts("a"), {"type": "x", "text": "a"}]}, "prediction.content[1].type"),
        (
            {"type": "content", "content": [{"type": "text", "text": "", "prompt_cache_breakpoint": {}}]},
            "prediction.content[0].prompt_cache_breakpoint.mode",
        ),
    ],
)  # fmt: skip
def test_a_malformed_prediction_is_refused_with_its_field(value, param):
    with pytest.raises(InvalidRequestError) as error:
        check_speculation(chat(prediction=value), DRAFTS)
    assert error.value.param == param


def test_a_prediction_without_effect_is_refused():
    for body, at in (
        ({}, OFF),
        ({"speculative": {"enabled": False}}, DRAFTS),
        ({"mirostat": 1}, DRAFTS),
    ):
        assert refused(chat(**predicted(), **body), at).param == "prediction"
    with pytest.raises(InvalidRequestError) as error:
        completion(**predicted())
    assert error.value.param == "prediction" and error.value.code == "unsupported_parameter"


def test_a_prediction_combines_with_fields_that_openai_refuses():
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"n": 3, "logprobs": True, "presence_penalty": 1.0, "frequency_penalty": 1.0, "max_completion_tokens": 5}
    fields = chat(**predicted(), **body, tools=[tool], mirostat=0)
    check_speculation(fields, DRAFTS)


@pytest.mark.parametrize("extra", [predicted(), {"speculative": {"enabled": True}}])
def test_beam_search_drafts_nothing(extra):
    identity, salts = Identity("t", Scope.INFERENCE, b"k"), Salts(b"s", shared=False)
    with pytest.raises(InvalidRequestError) as error:
        chat_options(chat(use_beam_search=True, **extra), identity, salts)
    assert error.value.param == next(iter(extra))
    completion_options(completion(use_beam_search=True, speculative={"enabled": False}), None, identity, salts)


async def test_the_ids_of_a_prediction():
    entry = FakeEntry(DRAFTS)
    assert await prediction_ids(chat(), entry) == []
    assert await prediction_ids(completion(), entry) == []
    assert await prediction_ids(chat(**predicted("")), entry) == []
    assert await prediction_ids(chat(**predicted("ab\u00e9")), entry) == list("ab\u00e9".encode())
    assert await prediction_ids(chat(**predicted(parts("ab", "", "c"))), entry) == list(b"abc")


async def test_a_prediction_gets_no_beginning_of_text():
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    bundle = make_bundle(byte_fallback_json(), special_tokens=special, add_bos_token=True)
    pipeline = TextPipeline(bundle, TextThreads())
    entry = FakeEntry(facts(vocab_size=2000, speculative_method="ngram"), pipeline=pipeline)
    with_bos = await pipeline.encode("hello", True)
    ids = await prediction_ids(chat(**predicted("hello")), entry)
    assert with_bos[0] == pipeline.token_id("<s>") and ids == with_bos[1:]


async def test_a_prediction_may_be_as_long_as_the_context():
    entry = FakeEntry(DRAFTS)
    limit = context_limit(entry.facts)
    assert len(await prediction_ids(chat(**predicted("a" * limit)), entry)) == limit
    # One token more, and so many that it is refused before it is tokenized.
    for length in (limit + 1, 5 * limit):
        with pytest.raises(InvalidRequestError, match=str(limit)) as error:
            await prediction_ids(chat(**predicted("a" * length)), entry)
        assert error.value.param == "prediction" and error.value.code != "context_length_exceeded"


def test_a_prediction_outside_the_vocabulary_is_refused():
    assert refused(chat(**predicted(json.dumps("\u00e9z"))), facts(vocab_size=100)).param == "prediction"
