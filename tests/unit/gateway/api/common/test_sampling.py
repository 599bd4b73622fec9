"""Sampling fields: conversion to SamplingParams, neutral values, words as token ids, and refused combinations."""

from __future__ import annotations

import pytest

from gateway.api.common.fields import ChatFields, CompletionFields, parse_fields
from gateway.api.common.options import chat_options, completion_options
from gateway.api.common.prepared import sampling_params
from gateway.api.common.refused import NO_EFFECT
from gateway.api.common.sampling import word_values
from gateway.flow.salt import Salts
from gateway.http.auth import Identity, Scope
from gateway.text.pipeline import TextPipeline, TextThreads
from shared.errors import InvalidRequestError
from shared.sampling_params import RepetitionDetection, SamplingParams
from tests.fakes.tokenizers import byte_fallback_json, make_bundle

IDENTITY = Identity("t", Scope.INFERENCE, b"k")
SALTS = Salts(b"s", shared=False)


def completion(**body):
    fields = parse_fields({"model": "m", "prompt": "x", **body}, CompletionFields)
    return completion_options(fields, fields.suffix, IDENTITY, SALTS)


def chat(**body):
    fields = parse_fields({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}, ChatFields)
    return chat_options(fields, IDENTITY, SALTS)


def sampling(make, **body) -> SamplingParams:
    return sampling_params(make(seed=1, **body), 16, 500)


FLOATS = {
    "temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "dry_multiplier": 0.8, "dry_base": 2.0,
}  # fmt: skip
INTEGERS = {"top_k": 5, "dry_allowed_length": 3, "dry_penalty_last_n": 64, "min_tokens": 2}


@pytest.mark.parametrize("make", [chat, completion])
def test_every_field_arrives(make):
    got = sampling(make, **FLOATS, **INTEGERS)
    assert {name: getattr(got, name) for name in (*FLOATS, *INTEGERS)} == {**FLOATS, **INTEGERS}
    got = sampling(make, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2)
    assert (got.mirostat, got.mirostat_tau, got.mirostat_eta) == (2, 3.0, 0.2)
    detection = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    got = sampling(make, repetition_detection=detection, allowed_token_ids=[3, 4], ignore_eos=True, stop_token_ids=[9])
    assert got.repetition_detection == RepetitionDetection(**detection)
    assert got.allowed_token_ids == (3, 4) and got.ignore_eos and got.stop_token_ids == (9,)
    got = sampling(make, repetition_detection={"max_pattern_size": 8, "min_pattern_size": None, "min_count": None})
    assert got.repetition_detection == RepetitionDetection(max_pattern_size=8)


@pytest.mark.parametrize("make", [chat, completion])
def test_without_fields_the_defaults_are_those_of_sampling_params(make):
    assert sampling(make) == SamplingParams(seed=1, max_tokens=16)
    nothing = {
        "top_k": -1, "top_n_sigma": -1.0, "typ_p": 1.0, "xtc_probability": 0.0, "dynatemp_range": 0.0, "mirostat": 0,
        "dry_multiplier": 0.0, "dry_sequence_breakers": ["\n"], "bad_words": [], "use_beam_search": False,
        "length_penalty": 1.0, "early_stopping": False, "stop_regex": [], "store": False, "metadata": {},
        "spaces_between_special_tokens": True, "mirostat_tau": 5.0,
    }  # fmt: skip
    assert sampling(make, **nothing) == SamplingParams(seed=1, max_tokens=16)


@pytest.mark.parametrize("make", [chat, completion])
def test_an_empty_nucleus_keeps_the_likeliest_token(make):
    """OpenAI accepts top_p = 0."""
    got = sampling(make, top_p=0, top_k=40, temperature=0.8)
    assert (got.top_k, got.top_p, got.temperature) == (1, 1.0, 0.8)
    with pytest.raises(InvalidRequestError, match="top_p cannot be combined with mirostat"):
        sampling(make, top_p=0, mirostat=1)
    with pytest.raises(InvalidRequestError, match=r"top_p must be in \[0, 1\], got"):
        sampling(make, top_p=-0.5)


def test_neutral_values_of_unsupported_fields_change_nothing():
    for name, values in NO_EFFECT.items():
        for make, struct in ((chat, ChatFields), (completion, CompletionFields)):
            for value in values if name not in struct.__struct_fields__ else ():
                assert sampling(make, **{name: value}) == SamplingParams(seed=1, max_tokens=16)
    for name, value in (("echo", 0), ("echo", True), ("best_of", 2), ("n_probs", False), ("suffix", " ")):
        with pytest.raises(InvalidRequestError, match=f"This value of {name}"):
            chat(**{name: value})


def test_llama_cpp_and_vllm_names_of_one_parameter():
    assert sampling(chat, typ_p=0.4).typical_p == sampling(chat, typical_p=0.4, typ_p=0.4).typical_p == 0.4
    with pytest.raises(InvalidRequestError, match="differ") as refused:
        chat(typical_p=0.4, typ_p=0.5)
    assert refused.value.param == "typ_p"
    for name in ("mirostat_lr", "mirostat_ent", "repeat_penalty", "n_predict", "samplers", "n_probs"):
        with pytest.raises(InvalidRequestError) as refused:
            chat(**{name: 1})
        assert refused.value.param == name and refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"mirostat": 1, name: value}, name) for name, value in (
            ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("typical_p", 0.9), ("typ_p", 0.9), ("top_n_sigma", 1.0),
            ("xtc_probability", 0.1), ("dynatemp_range", 0.1),
        )],
        ({"mirostat": 3}, "mirostat"), ({"mirostat": -1}, "mirostat"), ({"mirostat": True}, "mirostat"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [500]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"), ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"), ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"), ({"bad_words": ["a", "x" * 257]}, "bad_words[1]"),
        ({"dry_sequence_breakers": ["a"] * 17}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"), ({"dry_sequence_breakers": [1]}, "dry_seq"),
        ({"repetition_detection": {}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 4, "x": 1}}, "repetition_detection.x"),
        ({"repetition_detection": {"max_pattern_size": 2**40}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, "repetition_detection"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"truncate_prompt_tokens": -2}, "truncate_prompt"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "x"}, "trunc"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"stop_regex": "("}, "stop_regex"), ({"stop_regex": "a*"}, "stop_regex"), ({"stop_regex": 5}, "stop_regex"),
        ({"length_penalty": 2.0}, "length_penalty"), ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never"}, "early_stopping"), ({"early_stopping": 1}, "early_stopping"),
        ({"service_tier": "scale"}, "service_tier"), ({"service_tier": "flex", "priority": 1}, "service_tier"),
        ({"service_tier": 1}, "service_tier"), ({"store": True}, "store"), ({"store": 0}, "store"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"), ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"), ({"metadata": {"": "v"}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"), ({"metadata": []}, "metadata"),
        ({"safety_identifier": "s" * 129}, "safety_identifier"), ({"safety_identifier": ""}, "safety_identifier"),
        ({"prompt_cache_key": "s" * 65}, "prompt_cache_key"), ({"prompt_cache_retention": "24h"}, "prompt_cache_ret"),
        ({"user": 5}, "user"),
        ({"web_search_options": {}}, "web_search_options"), ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [chat, completion])
def test_invalid_fields_are_refused(make, fields, param):
    with pytest.raises(InvalidRequestError) as refused:
        sampling(make, **fields)
    assert refused.value.param is not None and refused.value.param.startswith(param)


NUMBERS = [
    *FLOATS, *INTEGERS, "typ_p", "mirostat", "mirostat_tau", "mirostat_eta", "length_penalty", "truncate_prompt_tokens",
    "prompt_logprobs",
]  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300, -1e300, "1", True, [], {}])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_and_of_other_types_are_refused(name, value):
    # CVE-2026-54235, CVE-2026-21869
    with pytest.raises(InvalidRequestError) as refused:
        sampling_params(completion(use_beam_search=name == "length_penalty", **{name: value}), 16, 500)
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"), ({"temperature": 0.7}, "temperature"), ({"top_k": 5}, "top_k"),
        ({"seed": 1}, "seed"), ({"top_p": 0.5}, "top_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"), ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"), ({"mirostat": 1}, "mirostat"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"), ({"n": 21}, "n"),
        ({"length_penalty": 10.5}, "length_penalty"), ({"early_stopping": "always"}, "early_stopping"),
        ({"dry_multiplier": 0.5}, "dry_multiplier"), ({"xtc_probability": 0.5}, "xtc_probability"),
    ],
)  # fmt: skip
def test_fields_that_beam_search_refuses(fields, param):
    with pytest.raises(InvalidRequestError) as refused:
        completion(use_beam_search=True, **fields)
    assert refused.value.param == param


def test_beam_search():
    beams = completion(use_beam_search=True, n=2, best_of=5, length_penalty=0.5, early_stopping="never").beams
    assert (beams.width, beams.num_returned, beams.length_penalty, beams.early_stopping) == (5, 2, 0.5, "never")
    beams = chat(use_beam_search=True, n=3, temperature=0, response_format={"type": "text"}).beams
    assert (beams.width, beams.num_returned, beams.length_penalty, beams.early_stopping) == (3, 3, 1.0, False)
    assert completion().beams is None


# ---- words ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def threads():
    running = TextThreads()
    yield running
    running.close()


async def test_bad_words_with_and_without_a_space(threads):
    pipeline = TextPipeline(make_bundle(), threads)
    fields = completion(bad_words=["fox", " quick", "qzx", "fox"]).fields
    words = (await word_values(fields, pipeline))["bad_words"]
    texts = [pipeline.decode(ids, False) for ids in words]
    for word in ("fox", "quick"):
        assert word in texts
        bare, spaced = await pipeline.encode(word, False), await pipeline.encode(" " + word, False)
        assert (" " + word in texts) == (len(bare) == len(spaced))
    assert "qzx" in texts and len(words) == len(set(words))
    # Where every text begins with a space of its own, one spelling is all there is.
    fallback = TextPipeline(make_bundle(byte_fallback_json()), threads)
    (only,) = (await word_values(completion(bad_words=["he"]).fields, fallback))["bad_words"]
    assert fallback.token_bytes(only[0]).startswith(b" ")
    with pytest.raises(InvalidRequestError) as refused:
        await word_values(completion(bad_words=["a", " "]).fields, pipeline)
    assert refused.value.param == "bad_words[1]"


async def test_sequence_breakers_are_all_tokens_that_contain_them(threads, monkeypatch):
    pipeline = TextPipeline(make_bundle(), threads)
    table = [pipeline.token_bytes(token_id) for token_id in range(400)]
    default = (await word_values(completion(dry_multiplier=0.8).fields, pipeline))["dry_breakers"]
    assert default == tuple(
        i for i, data in enumerate(table) if any(mark in data for mark in (b"\n", b":", b'"', b"*"))
    )
    assert default and await pipeline.tokens_containing(("\n", ":", '"', "*")) is default
    fields = completion(dry_multiplier=0.8, dry_sequence_breakers=["o", "."]).fields
    own = (await word_values(fields, pipeline))["dry_breakers"]
    assert own == tuple(i for i, data in enumerate(table) if b"o" in data or b"." in data)
    fields = completion(dry_multiplier=1.0, dry_sequence_breakers=[]).fields
    assert await word_values(fields, pipeline) == {"dry_breakers": ()}
    assert await word_values(completion(dry_sequence_breakers=["x"]).fields, pipeline) == {}
    monkeypatch.setattr("gateway.api.common.sampling.MAX_DRY_BREAKERS", 3)
    with pytest.raises(InvalidRequestError) as refused:
        await word_values(completion(dry_multiplier=0.8).fields, pipeline)
    assert refused.value.param == "dry_sequence_breakers"
    for number in range(40):
        await pipeline.tokens_containing((str(number),))
    assert len(pipeline._containing) <= 16


# ---- bookkeeping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "priority", "used"),
    [
        ("auto", 0, "default"),
        ("default", 0, "default"),
        ("fast", -1000, "priority"),
        ("flex", 1000, "flex"),
        ("priority", -1000, "priority"),
    ],
)
def test_service_tiers(tier, priority, used):
    options = chat(service_tier=tier)
    assert (options.priority, options.tier) == (priority, used)


def test_accounting_fields_do_not_change_sampling():
    taken = {"user": "u", "safety_identifier": "s" * 128, "store": False, "prompt_cache_retention": "in_memory"}
    assert sampling(chat, **taken, metadata={"k" * 64: "v" * 512}) == sampling(chat)
    assert chat().tier is None
