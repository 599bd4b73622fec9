"""Conversion of a worker's outputs to deltas: stop strings, tokens, limits and logprobs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.flow.choice import Choice, scanners_of
from gateway.flow.events import TextDelta
from gateway.flow.outbox import merged
from gateway.text.detokenizer import Detokenizer, build_token_bytes
from shared.errors import InternalError
from shared.messages import DraftCounts, Finish, FinishReason, Output, TokenLogprobs
from shared.sampling_params import SamplingParams
from tests.fakes.gateway_core import make_request
from tests.fakes.tokenizers import byte_level_json

TOKENIZER = Tokenizer.from_buffer(byte_level_json())
TABLE = build_token_bytes(json.loads(byte_level_json()), TOKENIZER.get_vocab())
STOP = Finish(FinishReason.STOP, stop_token_id=2)
LENGTH = Finish(FinishReason.LENGTH)


def ids_of(text: str) -> list[int]:
    return [TABLE.table.index(bytes([byte])) for byte in text.encode()]


def make(*stop: str, **changes: Any) -> Choice:
    request = make_request([1], stop=stop, **changes)
    new_scanner = scanners_of(request)
    scanner = None if new_scanner is None else new_scanner()
    return Choice(0, request, scanner, Detokenizer(TABLE, skip_special_tokens=request.skip_special_tokens))


def feed(choice: Choice, token_ids: list[int], finish: Finish | None = None, **fields: Any) -> TextDelta:
    return choice.advance(Output("r", 0, token_ids, finish, **fields), 512)


def test_a_stop_string_inside_one_output_cuts_ids_and_logprobs() -> None:
    choice = make("lo", sampling=SamplingParams(max_tokens=64, logprobs=0))
    ids = ids_of("hello!")
    logprobs = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in ids]
    delta = feed(choice, ids, logprobs=logprobs)
    assert (delta.text, delta.finish_reason) == ("hel", "stop")
    assert delta.token_ids == ids[:5]
    assert delta.logprobs == logprobs[:5]
    assert choice.token_ids == ids[:5]


@pytest.mark.parametrize(
    ("fields", "text", "finish", "shown", "reason"),
    [
        ({"stop": ("b",)}, "ab", LENGTH, "a", "stop"),
        ({"stop": ("lo",), "include_stop_str_in_output": True}, "hello!", None, "hello", "stop"),
        ({"stop": ("a",), "sampling": SamplingParams(max_tokens=64, min_tokens=3)}, "aaaxa", None, "aaax", "stop"),
    ],
)
def test_stop_strings_in_one_output(fields: dict, text: str, finish: Finish | None, shown: str, reason: str) -> None:
    delta = feed(make(*fields.pop("stop"), **fields), ids_of(text), finish)
    assert (delta.text, delta.finish_reason) == (shown, reason)


def test_the_reason_of_a_stop_is_what_the_request_named() -> None:
    named = SamplingParams(max_tokens=64, stop_token_ids=(2, 7))
    assert feed(make("lo", "l"), ids_of("hello!")).stop_reason == "l"
    assert feed(make(stop_regex=(r"\d+x",)), ids_of("12x")).stop_reason == "12x"
    assert feed(make(sampling=named), [2], STOP).stop_reason == 2
    assert feed(make("a", sampling=named), [*ids_of("a"), 2], STOP).stop_reason == "a"
    assert feed(make(), [2], STOP).stop_reason is None, "the model's own end"
    assert feed(make("x", sampling=named), ids_of("a"), LENGTH).stop_reason is None
    assert feed(make("x", sampling=named), ids_of("a")).stop_reason is None


def test_held_text_is_flushed_at_the_end() -> None:
    choice = make("bcd")
    assert feed(choice, ids_of("abc")).text == "a"
    delta = feed(choice, [2], STOP)
    assert (delta.text, delta.finish_reason) == ("bc", "stop")


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_a_choice_has_no_text(skip: bool) -> None:
    letter = ids_of("z")[0]
    delta = feed(make(skip_special_tokens=skip), [*ids_of("a"), letter], Finish(FinishReason.STOP, letter))
    assert (delta.text, delta.token_ids[-1]) == ("a", letter)
    kept = feed(make(include_stop_str_in_output=True), [letter], Finish(FinishReason.STOP, letter))
    assert kept.text == "z"


def test_a_code_point_cut_by_the_limit_is_replaced() -> None:
    choice = make()
    assert feed(choice, ids_of("é🛑")[:4]).text == "é"
    delta = feed(choice, [], LENGTH)
    assert (delta.text, delta.finish_reason) == ("\ufffd", "length")


@pytest.mark.parametrize("stop", [(), ("ab",), ("🛑a",)])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_any_grouping_of_tokens_gives_the_same_text(stop: tuple[str, ...], size: int) -> None:
    ids = ids_of("b🛑🛑ba🛑aab🛑")
    whole = feed(make(*stop), ids, LENGTH)
    choice = make(*stop)
    deltas = [
        feed(choice, ids[start : start + size], LENGTH if start + size >= len(ids) else None)
        for start in range(0, len(ids), size)
        if not choice.finished
    ]
    found = merged(deltas)
    assert (found.text, found.token_ids, found.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)


@pytest.mark.parametrize(("token_ids", "logprobs"), [([512], None), ([-1], None), ([5] * 65, None), ([5], 0)])
def test_impossible_outputs_are_failures(token_ids: list[int], logprobs: int | None) -> None:
    with pytest.raises(InternalError):
        feed(make(sampling=SamplingParams(max_tokens=64, logprobs=logprobs)), token_ids)


def test_drafts_are_told_at_the_end() -> None:
    choice = make()
    assert feed(choice, ids_of("abc"), drafts=DraftCounts(2, 1)).drafts is None
    assert feed(choice, ids_of("d")).drafts is None
    assert feed(choice, [*ids_of("e"), 2], STOP, drafts=DraftCounts(3, 4)).drafts == DraftCounts(3, 4)
    assert feed(make(), ids_of("a"), LENGTH).drafts is None
    assert feed(make("lo"), ids_of("lo")).drafts is None
    choice = make()
    feed(choice, ids_of("a"), drafts=DraftCounts(0, 3))
    assert feed(choice, ids_of("b"), LENGTH).drafts == DraftCounts(0, 3), "an end without news of them"


@pytest.mark.parametrize(
    ("counts", "num_cut"),
    [
        # The stop string leaves 5 of the 6 tokens of "hello!"; the cases differ in drafts and cut drafts.
        (DraftCounts(6, 0), 1),
        (DraftCounts(5, 2), 0),
        (DraftCounts(0, 7), 0),
    ],
)
@pytest.mark.parametrize("finish", [None, LENGTH])
def test_accepted_drafts_behind_a_stop_string_are_in_no_completion(
    counts: DraftCounts, num_cut: int, finish: Finish | None
) -> None:
    for before in (DraftCounts(0, 0), DraftCounts(3, 2)):
        choice = make("lo")
        feed(choice, ids_of("abcd"), drafts=before)
        so_far = DraftCounts(before.num_accepted + counts.num_accepted, before.num_rejected + counts.num_rejected)
        delta = feed(choice, ids_of("hello!"), finish, drafts=so_far)
        assert delta.finish_reason == "stop" and len(delta.token_ids) == 5
        assert delta.drafts == DraftCounts(so_far.num_accepted - num_cut, so_far.num_rejected + num_cut)
