"""Request options and budgets: every body becomes valid options or an InvalidRequestError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.common.fields import ChatFields, CompletionFields, TokenizeFields, parse_fields
from gateway.api.common.messages import check_messages
from gateway.api.common.options import chat_options, completion_options
from gateway.api.common.prepared import sampling_params
from gateway.api.common.prompts import SizedPrompt, fit_prompt, split_prompts
from gateway.api.common.refused import NO_EFFECT, UNSUPPORTED
from gateway.flow.salt import Salts
from gateway.http.auth import Identity, Scope
from shared.errors import ContextLengthError, InvalidRequestError
from tests.fakes.fake_generator import FakeEntry, facts

IDENTITY = Identity("t", Scope.INFERENCE, b"k")
SALTS = Salts(b"s", shared=False)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 1e999])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__, *UNSUPPORTED})


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_any_body_is_accepted_or_refused(body):
    try:
        chat = parse_fields({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}, ChatFields)
        check_messages(chat.messages)
        options = chat_options(chat, IDENTITY, SALTS)
        sampling_params(options, options.max_tokens or 5, 258).validate(258)
    except InvalidRequestError as error:
        assert error.param
    try:
        fields = parse_fields({"model": "m", "prompt": "x", **body}, CompletionFields)
        options = completion_options(fields, fields.suffix, IDENTITY, SALTS)
        assert split_prompts(fields.prompt)
        sampling_params(options, options.max_tokens or 5, 258).validate(258)
    except InvalidRequestError as error:
        assert error.param


@pytest.mark.parametrize("name", sorted(set(UNSUPPORTED).difference(TokenizeFields.__struct_fields__)))
def test_unsupported_fields_are_accepted_only_with_neutral_values(name):
    for value in (None, *NO_EFFECT.get(name, ())):
        parse_fields({"model": "m", "prompt": "x", name: value}, TokenizeFields)
    with pytest.raises(InvalidRequestError) as refused:
        parse_fields({"model": "m", "prompt": "x", name: "something"}, TokenizeFields)
    assert refused.value.param == name and refused.value.code == "unsupported_parameter"


def fitted(num_tokens, max_tokens, default, limits, **more) -> SizedPrompt:
    fields = parse_fields({"model": "m", "messages": [], "max_tokens": max_tokens, **more}, ChatFields)
    return fit_prompt([1] * num_tokens, chat_options(fields, IDENTITY, SALTS), default, FakeEntry(limits), "prompt")


def test_the_budget_of_generated_tokens():
    limits = facts(max_model_len=100, num_pages=1000)
    assert fitted(90, None, None, limits).max_tokens == 10
    assert fitted(90, None, 16, limits).max_tokens == 10
    assert fitted(10, None, 16, limits).max_tokens == 16
    assert fitted(90, 10, 16, limits).max_tokens == 10
    with pytest.raises(
        ContextLengthError, match=r"90 tokens and max_tokens is 11, 101 .*maximum context length is 100"
    ):
        fitted(90, 11, 16, limits)
    with pytest.raises(ContextLengthError, match=r"100 tokens.*maximum context length is 100"):
        fitted(100, None, 16, limits)
    # A cache smaller than the context is the limit, and is named.
    with pytest.raises(ContextLengthError, match=r"KV cache.* 32 tokens"):
        fitted(32, None, 16, facts(max_model_len=100, num_pages=2))


@pytest.mark.parametrize(("wanted", "budget"), [(0, 0), (5, 5), (11, 10)])
def test_a_clamped_limit_never_exceeds_the_context(wanted, budget):
    fields = parse_fields({"model": "m", "messages": []}, ChatFields)
    options = chat_options(fields, IDENTITY, SALTS, clamped_max_tokens=wanted)
    prompt = fit_prompt([1] * 90, options, None, FakeEntry(facts(max_model_len=100)), "messages")
    assert (prompt.max_tokens, prompt.room, options.scores_only) == (budget, 10, wanted == 0)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stream_options": {"x": 1}}, "stream_options.x", ""),
        (
            {"response_format": {"type": None}},
            "response_format.type",
            "Invalid type for response_format.type: expected str, got null.",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "Invalid value for response_format.type: 'xml'.",
        ),
        (
            {"response_format": {"type": "x" * 1000}},
            "response_format.type",
            f"Invalid value for response_format.type: '{'x' * 63}.",
        ),
    ],
)
def test_errors_name_the_nested_field(fields, param, message):
    with pytest.raises(InvalidRequestError) as refused:
        parse_fields({"model": "m", "messages": [], **fields}, ChatFields)
    assert refused.value.param == param and refused.value.message in (message or refused.value.message)
