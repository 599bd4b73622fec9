"""Ranges of the sampling parameters, with the values that have broken other servers."""

from __future__ import annotations

import math

import msgspec
import pytest

from shared.errors import InvalidRequestError
from shared.sampling_params import MAX_LOGPROBS, MAX_SEED, RepetitionDetection, SamplingParams, ThinkingBudget

VOCAB = 100
NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "typical_p",
    "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat_tau",
    "mirostat_eta", "dry_multiplier", "dry_base",
)  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"temperature": 1e-30},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"top_k": 2**31 - 1},
        {"min_p": 1.0},
        {"seed": -MAX_SEED - 1},
        {"seed": MAX_SEED},
        {"logit_bias": {99: -100.0, 0: 100.0}},
        {"stop_token_ids": (0, 99)},
        {"min_tokens": 16, "max_tokens": 16},
        {"logprobs": MAX_LOGPROBS, "prompt_logprobs": 0},
        {"typical_p": 1e-9, "top_n_sigma": 100.0, "xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"dynatemp_range": 2.0, "dynatemp_exponent": 0.01, "mirostat": 2, "mirostat_tau": 20.0, "mirostat_eta": 1.0},
        {"dry_multiplier": 100.0, "dry_base": 1.0, "dry_allowed_length": 1024, "dry_penalty_last_n": 0},
        {"dry_breakers": (0, 99), "allowed_token_ids": tuple(range(100)), "bad_words": ((1,), (1, 2, 99))},
        {"bad_words": ((5,) * 2048,)},
        {"repetition_detection": RepetitionDetection(max_pattern_size=1024, min_pattern_size=1024, min_count=2)},
        {"thinking": ThinkingBudget(max_tokens=0, start_ids=(), end_ids=(99,))},
    ],
)
def test_values_in_range_pass(fields):
    SamplingParams(**fields).validate(VOCAB)


OUT_OF_RANGE = {
    "temperature": (2.1, -0.1),
    "top_p": (0.0, 1.0001),
    "min_p": (-0.1,),
    "repetition_penalty": (0.0, 1e-38),
    "top_k": (-1, 2**31),
    "seed": (MAX_SEED + 1, -MAX_SEED - 2),
    "max_tokens": (0, 10**30),
    "min_tokens": (-1, 17),
    "logprobs": (-1, MAX_LOGPROBS + 1),
    "prompt_logprobs": (10**9,),
    "stop_token_ids": ((VOCAB,), (-1,), tuple(range(257))),
    "logit_bias": (
        *({VOCAB: 1.0}, {-1: 1.0}, {1: math.nan}, {1: math.inf}, {1: 100.1}),
        dict.fromkeys(range(1025), 1.0),
    ),
    "typical_p": (0.0, 1.0001),
    "top_n_sigma": (-1.0,),
    "xtc_probability": (1.1,),
    "xtc_threshold": (-0.1,),
    "dynatemp_range": (2.1,),
    "dynatemp_exponent": (0.0,),
    "mirostat": (3, -1),
    "mirostat_tau": (0.0,),
    "mirostat_eta": (0.0,),
    "dry_base": (0.99, 10.1),
    "dry_allowed_length": (0, 1025),
    "dry_penalty_last_n": (-2,),
    "dry_breakers": ((VOCAB,), (1,) * 16385),
    "allowed_token_ids": ((VOCAB,), (-1,), (1,) * (VOCAB + 1)),
    "bad_words": (((),), ((1, VOCAB),), ((-1,),), ((1,),) * 1025, ((1,) * 2049,)),
    "repetition_detection": (
        RepetitionDetection(max_pattern_size=0),
        RepetitionDetection(max_pattern_size=1025),
        RepetitionDetection(max_pattern_size=4, min_pattern_size=5),
        RepetitionDetection(max_pattern_size=4, min_pattern_size=0),
        RepetitionDetection(max_pattern_size=4, min_count=1),
        RepetitionDetection(max_pattern_size=4, min_count=1025),
    ),
}


@pytest.mark.parametrize("name", [*NUMBERS, *sorted(set(OUT_OF_RANGE) - set(NUMBERS))])
def test_values_out_of_range_are_refused_by_name(name):
    extreme = (math.nan, math.inf, -math.inf, 1e30, -1e30, -2.0000001, 101) if name in NUMBERS else ()
    for value in (*extreme, *OUT_OF_RANGE.get(name, ())):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            SamplingParams(**{name: value}).validate(VOCAB)
        assert (caught.value.param, caught.value.status) == (name, 400), value


@pytest.mark.parametrize(
    "budget",
    [
        ThinkingBudget(max_tokens=-1, start_ids=(), end_ids=(1,)),
        ThinkingBudget(max_tokens=1, start_ids=(), end_ids=()),
        ThinkingBudget(max_tokens=1, start_ids=(VOCAB,), end_ids=(1,)),
        ThinkingBudget(max_tokens=1, start_ids=(), end_ids=(1,) * 65),
    ],
)
def test_a_thinking_budget_is_named_as_the_client_knows_it(budget):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(thinking=budget).validate(VOCAB)
    assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize(
    "fields",
    [{"typical_p": 0.9}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}, {"mirostat": 1}],
    ids=str,
)
def test_the_rarer_filters_count_only_beside_noise(fields):
    assert SamplingParams(**fields).extended
    assert not SamplingParams(temperature=0.0, **fields).extended
    assert not SamplingParams(**fields).uses_dry


def test_dry_counts_where_it_looks_at_tokens():
    assert SamplingParams(temperature=0.0, dry_multiplier=0.8).uses_dry
    assert not SamplingParams(dry_multiplier=0.8, dry_penalty_last_n=0).uses_dry
    assert not SamplingParams().uses_dry and not SamplingParams().extended


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_defaults_are_left_out_on_the_wire():
    assert msgspec.msgpack.encode(SamplingParams()) == b"\xde\x00\x00"  # a map without entries
