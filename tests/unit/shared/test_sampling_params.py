"""Ranges of the sampling parameters, with the values that have broken other servers."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequestError
from shared.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams

VOCAB = 100


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
    ],
)
def test_values_in_range_pass(fields):
    SamplingParams(**fields).validate(VOCAB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            for value in (math.nan, math.inf, -math.inf, 1e30, -1e30, -2.0000001, 101)
        ),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("top_k", -1),
        ("top_k", 2**31),
        ("seed", MAX_SEED + 1),
        ("seed", -MAX_SEED - 2),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", 10**9),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(257))),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 100.1}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}).validate(VOCAB)
    assert caught.value.param == name
    assert name in caught.value.message
    assert caught.value.status == 400


@given(
    st.sampled_from(["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]),
    st.floats(),
)
def test_whatever_passes_is_finite(name, value):
    params = SamplingParams(**{name: value})
    try:
        params.validate(VOCAB)
    except InvalidRequestError as error:
        assert error.param == name
    else:
        assert math.isfinite(value)
        assert abs(value) <= 100


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_defaults_cost_no_bytes_on_the_wire():
    assert msgspec.msgpack.encode(SamplingParams()) == b"\x80"
