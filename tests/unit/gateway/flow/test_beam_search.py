"""Beam search: results compared with those of transformers, and the requests to the generator."""

from __future__ import annotations

import asyncio
import math
import re
import time
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.flow.beam_search import start_beam_search
from gateway.flow.beam_state import BeamParams, BeamState, BeamText
from gateway.flow.events import TextDelta
from gateway.text.message_parser import MessageFormat
from gateway.text.reasoning import REASONING_FORMATS
from gateway.text.stop_regex import RegexScanner, StopRegexes
from gateway.text.stop_strings import StopScanner, StopStrings
from shared.errors import InternalError, InvalidRequestError, UnavailableError, WorkerLostError
from shared.messages import TokenLogprobs
from shared.sampling_params import SamplingParams
from tests.fakes.fake_generator import EOS, BytePipeline, FakeGenerator, facts
from tests.fakes.gateway_core import make_request, until

PROMPT = [1, 17, 5, 9]
_VOCAB = 48


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tiny model waits for its threads longer than it computes
    config = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.6,
    )  # fmt: skip
    yield LlamaForCausalLM(config).eval()
    torch.set_num_threads(num_threads)


def report(model, ids, count):
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    values, tokens = logprobs.topk(count)
    return TokenLogprobs(int(tokens[0]), float(values[0]), 1, tokens.tolist(), values.tolist())


@pytest.mark.parametrize(("width", "stop_ids"), [(2, (4, 11, 30)), (5, (5, 7, 12, 19, 23, 41)), (4, (2,))])
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.5, 0.0, 2.0])
def test_hypotheses_are_those_of_transformers(model, width, penalty, early, stop_ids):
    state = BeamState(
        BeamParams(width=width, num_returned=width, length_penalty=penalty, early_stopping=early),
        max_tokens=12,
        stop_ids=stop_ids,
    )
    while not state.done:
        state.advance([report(model, PROMPT + beam.token_ids, state.num_alternatives) for beam in state.live])
    expected = model.generate(
        torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=12, do_sample=False,
        length_penalty=penalty, early_stopping=early, eos_token_id=list(stop_ids), pad_token_id=0,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert [beam.token_ids for beam in state.finished] == [
        _without_padding(ids, stop_ids) for ids in expected.sequences
    ]
    assert [beam.score for beam in state.finished] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5)


STOPS = (5, 7, 12, 19, 23, 41)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("as_regex", [False, True])
def test_stop_strings_end_hypotheses_as_stop_tokens_do(model, as_regex, early):
    """Detokenizer whose tokens are one character each."""
    detokenizer = BytePipeline().detokenizer(skip_special_tokens=True)
    chars = [chr(token_id) for token_id in STOPS]
    regexes = StopRegexes([f"[{re.escape(''.join(chars))}]"])
    scanner = RegexScanner(regexes) if as_regex else StopScanner(StopStrings(chars))

    def found(**fields):
        state = BeamState(BeamParams(width=5, num_returned=5, early_stopping=early), max_tokens=12, **fields)
        while not state.done:
            state.advance([report(model, PROMPT + beam.token_ids, _VOCAB) for beam in state.live])
        return [beam.token_ids for beam in state.finished]

    hypotheses = found(text=BeamText(detokenizer, scanner))
    assert hypotheses == found(stop_ids=STOPS) and any(len(ids) < 12 for ids in hypotheses)
    late = found(text=BeamText(detokenizer, scanner), min_tokens=6)
    assert all(len(ids) > 6 and not set(ids[6:-1]) & set(STOPS) for ids in late)
    assert any(set(ids[:6]) & set(STOPS) for ids in late) and scanner.found is None


def test_where_everything_stops_there_are_as_many_hypotheses_as_beams(model):
    text = BeamText(
        BytePipeline().detokenizer(skip_special_tokens=True), StopScanner(StopStrings([chr(i) for i in range(_VOCAB)]))
    )
    state = BeamState(BeamParams(width=4, num_returned=4), max_tokens=12, text=text)
    state.advance([report(model, PROMPT, 20)])
    assert state.done and [len(beam.token_ids) for beam in state.finished] == [1, 1, 1, 1]


def _without_padding(ids, stop_ids):
    generated = ids[len(PROMPT) :].tolist()
    ends = [place for place, token in enumerate(generated) if token in stop_ids]
    return generated[: ends[0] + 1] if ends else generated


def test_min_tokens_and_masked_tokens():
    reports = TokenLogprobs(7, -0.1, 1, [7, 8, 9], [-0.1, -1.0, -2.0])
    state = BeamState(BeamParams(width=1, num_returned=1), max_tokens=4, min_tokens=2, stop_ids=[7], masked_ids=[8])
    while not state.done:
        state.advance([reports] * len(state.live))
    assert state.finished[0].token_ids == [9, 9, 7]


# ---- around a generator -----------------------------------------------------------------------------------------


def successors(table):
    """Generator of a model whose next token depends on the last one: {last: {next: probability}}."""

    def script(request):
        ranked = sorted(table[request.prompt_token_ids[-1]].items(), key=lambda entry: -entry[1])
        ids, values = [token for token, _ in ranked], [math.log(value) for _, value in ranked]
        of_prompt = [TokenLogprobs(1, None, 0, [], [])] if request.sampling.prompt_logprobs is not None else None
        report = TokenLogprobs(ids[0], values[0], 1, ids, values)
        yield TextDelta(0, "", [ids[0]], [report], num_cached_tokens=3, prompt_logprobs=of_prompt)
        yield TextDelta(0, "", [], finish_reason="length")

    return script


TABLE = {
    0: {65: 0.6, 66: 0.4},
    65: {67: 0.55, 68: 0.45},
    66: {EOS: 0.9, 67: 0.1},
    67: {EOS: 1.0},
    68: {EOS: 1.0},
}


def searcher(generator, *, served=None, **params):
    beams = BeamParams(**{"width": 2, "num_returned": 2} | params)
    return partial(start_beam_search, generator, beams, BytePipeline(), served or facts())


async def run(searching, request):
    async with searching(request) as search:
        return [delta async for delta in search]


async def test_parts_and_deltas():
    generator = FakeGenerator(successors(TABLE))
    sampling = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=0)
    searching = searcher(generator, length_penalty=0.0)
    deltas = await run(searching, make_request([9, 0], sampling=sampling, n=2, salt=b"s"))
    # 0.4 * 0.9 is better than 0.6 * 0.55, although the first step prefers the latter.
    assert [delta.text for delta in deltas] == ["B", "AC"] and [delta.choice for delta in deltas] == [0, 1]
    assert [delta.token_ids for delta in deltas] == [[66, EOS], [65, 67, EOS]]
    assert all(delta.finish_reason == "stop" and delta.num_cached_tokens == 3 for delta in deltas)
    assert deltas[0].prompt_logprobs is not None and deltas[1].prompt_logprobs is None
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        assert all(len(entry.top_ids) == 1 for entry in delta.logprobs)
    assert [request.prompt_token_ids for request in generator.requests[:3]] == [[9, 0], [9, 0, 65], [9, 0, 66]]
    assert all(
        request.sampling.max_tokens == 1 and request.n == 1 and request.salt == b"s" for request in generator.requests
    )
    assert not any(request.speculative for request in generator.requests)
    assert [request.sampling.prompt_logprobs for request in generator.requests[:2]] == [0, None]
    assert {request.sampling.logprobs for request in generator.requests} == {3}
    (room,) = generator.reservations
    assert room.request.n == 2 and room.begun and room.outcome == deltas and room.closed and not generator.live


async def test_beams_run_in_groups_where_the_cache_is_small():
    def script(request):
        others.append(len(generator.live))
        return successors(TABLE)(request)

    results = []
    for changes, most in (({}, 1), ({"num_pages": 2, "page_size": 1}, 0)):
        others: list[int] = []
        generator = FakeGenerator(script)
        searching = searcher(generator, served=facts(**changes), length_penalty=0.0)
        results.append(await run(searching, make_request([9, 0], max_tokens=5, n=2)))
        assert max(others) == most, "that run when one is sent"
    assert results[0] == results[1]


async def test_a_search_may_take_as_long_as_a_first_token():
    generator = FakeGenerator(successors(TABLE))
    generator.request_timeout = 0.0
    with pytest.raises(UnavailableError) as failed:
        await run(searcher(generator), make_request([0], n=2))
    assert failed.value.code == "request_timeout" and not generator.requests
    assert generator.reservations[0].closed and generator.reservations[0].outcome is not None
    generator.request_timeout = 1000.0
    before = time.time()
    await run(searcher(generator), make_request([0], n=2))
    (deadline,) = {request.deadline or 0.0 for request in generator.requests}
    assert before + 1000 <= deadline <= time.time() + 1000


async def test_a_stop_string_over_several_tokens_ends_a_hypothesis():
    for fields, text in (
        ({"stop": ("AC",)}, ""),
        ({"stop": ("AC",), "include_stop_str_in_output": True}, "AC"),
        ({"stop_regex": (r"C$|[A]C",), "include_stop_str_in_output": True}, "AC"),
    ):
        generator = FakeGenerator(successors(TABLE))
        deltas = await run(searcher(generator, length_penalty=0.0), make_request([9, 0], max_tokens=5, n=2, **fields))
        assert [delta.text for delta in deltas] == ["B", text]
        assert [delta.token_ids for delta in deltas] == [[66, EOS], [65, 67]]
        assert [delta.finish_reason for delta in deltas] == ["stop", "stop"]
        assert [0, 65, 67] not in [request.prompt_token_ids[1:] for request in generator.requests]
        assert not any(request.stop or request.stop_regex or request.format for request in generator.requests)


def test_stop_strings_where_the_model_reasons():
    generator = FakeGenerator()
    form = MessageFormat(new_splitter=lambda: REASONING_FORMATS["think"].new_splitter(False))
    for fields, param in (({"stop": ("a",)}, "stop"), ({"stop": ("a",), "stop_regex": ("b",)}, "stop_regex")):
        with pytest.raises(InvalidRequestError) as refused:
            searcher(generator)(make_request([0], n=2, format=form, **fields))
        assert refused.value.param == param and not generator.reservations


async def test_the_end_for_length():
    (delta,) = await run(searcher(FakeGenerator(successors(TABLE)), num_returned=1), make_request([0], max_tokens=1))
    assert (delta.text, delta.finish_reason, delta.logprobs) == ("A", "length", None)


async def test_a_failed_part_fails_the_search_and_ends_the_others():
    def script(request):
        if request.prompt_token_ids[-1] == 66:
            return [WorkerLostError("gone")]
        return successors(TABLE)(request)

    generator = FakeGenerator(script)
    with pytest.raises(WorkerLostError):
        await run(searcher(generator), make_request([0], n=2))
    assert isinstance(generator.reservations[0].outcome, WorkerLostError)
    assert generator.reservations[0].closed and not generator.live


async def test_a_client_that_goes_takes_all_beams_with_it():
    def script(request):
        return [60.0] if request.prompt_token_ids[-1] != 0 else successors(TABLE)(request)

    generator = FakeGenerator(script)
    task = asyncio.create_task(run(searcher(generator), make_request([0], n=2)))
    await until(lambda: len(generator.live) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not generator.live and generator.reservations[0].closed and generator.reservations[0].outcome is None
    assert [generation.cancelled for generation in generator.generations] == [False, True, True]


async def test_a_part_without_a_token_is_a_fault_of_the_worker():
    generator = FakeGenerator(lambda request: [TextDelta(0, "", [], finish_reason="stop")])
    with pytest.raises(InternalError):
        await run(searcher(generator), make_request([0], n=2))
    assert generator.reservations[0].closed


def test_more_beams_than_workers_report_tokens_for():
    generator = FakeGenerator()
    with pytest.raises(InvalidRequestError, match="at most 19 beams") as refused:
        searcher(generator, width=20, num_returned=20)(make_request([0], n=20))
    assert refused.value.param == "n" and not generator.reservations
    with pytest.raises(InvalidRequestError) as refused:
        sampling = SamplingParams(max_tokens=2, stop_token_ids=(1, 2, 3))
        searcher(generator, width=17, num_returned=2)(make_request([0], sampling=sampling, n=2))
    assert refused.value.param == "best_of" and "at most 16" in refused.value.message
    with pytest.raises(InvalidRequestError, match="131076") as refused:
        searcher(generator, width=4, num_returned=1)(make_request([1] * 32_000, max_tokens=769))
    assert refused.value.param == "best_of" and not generator.reservations
