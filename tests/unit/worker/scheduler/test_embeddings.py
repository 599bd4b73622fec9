"""Embedding requests in the scheduler: prompts after which nothing is sampled."""

from __future__ import annotations

import pytest

from shared.errors import ContextLengthError, InvalidRequestError
from shared.messages import FinishReason
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import POISON_TOKEN_ID, VOCAB_SIZE, embed
from worker.requests.embedding import Embedding
from worker.requests.request import SubmitLimits, validate_submit
from worker.scheduler.speculator import SpeculationConfig

PROMPT = [10 + index % 40 for index in range(50)]
TEXT = {"ignore_eos": True, "max_tokens": 12}


@pytest.fixture(params=["last", "mean"])
def pooling(request):
    return request.param


def expect_embedding(harness: Harness, submit) -> None:
    """Check that the request ended with one Output that holds the vector and no token."""
    (output,) = harness.outputs[submit.request_id, 0]
    assert output.finish.reason is FinishReason.STOP and output.finish.stop_token_id is None
    assert output.embedding == embed(submit.token_ids, submit.pooling)
    assert output.token_ids == [] and output.logprobs is None and output.drafts is None


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 33, 50])
def test_embedding_takes_only_the_steps_of_its_prompt(length, pooling, depth):
    harness = Harness(depth=depth, max_num_batched_tokens=16)
    submit = make_submit("a", PROMPT[:length], pooling=pooling)
    harness.run(submit)
    expect_embedding(harness, submit)
    items = [item for plan in harness.executor.plans for item in plan.scheduled]
    assert [item.count for item in items] == [16] * (length // 16) + [length % 16] * (length % 16 > 0)
    assert not any(item.sample for item in items)
    assert sum(item.num_pooled for item in items) == (length if pooling == "mean" else 1)
    counters = harness.scheduler.counters
    assert (counters.prompt_tokens_total, counters.generation_tokens_total) == (length, 0)
    assert counters.discarded_tokens_total == 0


def test_prefix_cache_serves_last_token_but_not_mean_pooling():
    harness = Harness()
    for number, pooling in enumerate(("last", "last", "mean", "mean")):
        harness.run(make_submit(f"e{number}", PROMPT[:18], pooling=pooling))
    cached = [harness.outputs[f"e{number}", 0][0].num_cached_tokens for number in range(4)]
    assert cached == [0, 16, 0, 0]
    vectors = [harness.outputs[f"e{number}", 0][0].embedding for number in range(4)]
    assert vectors == [embed(PROMPT[:18], "last")] * 2 + [embed(PROMPT[:18], "mean")] * 2
    # Text requests find the pages of an embedding request in the prefix cache, and the reverse.
    text = make_submit("t", [*PROMPT[:18], 60], sampling=TEXT)
    harness.run_solo(text)
    assert harness.outputs["t", 0][0].num_cached_tokens == 16


def test_mean_pooling_evicts_no_cached_pages(depth):
    harness = Harness(depth=depth, num_pages=16)
    text = make_submit("t", PROMPT[:33], sampling={"max_tokens": 1})
    harness.run(text)
    for number in range(9):
        # The prompts differ from the first token on; each takes four of the seven free pages.
        mean = make_submit(f"m{number}", [60 + number, *PROMPT[:15]], pooling="mean")
        harness.run(mean)
        expect_embedding(harness, mean)
    harness.run(make_submit("again", text.token_ids, sampling={"max_tokens": 1}))
    assert harness.outputs["again", 0][0].num_cached_tokens == 32
    assert harness.scheduler.counters.prefix_cache_evictions_total == 0


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_embedding_restarts_from_the_first_token(pooling, caching, depth):
    harness = Harness(
        depth=depth, num_pages=16, max_num_seqs=2, max_num_batched_tokens=8, enable_prefix_caching=caching
    )
    embedded = make_submit("e", PROMPT[:44], pooling=pooling)
    harness.add(embedded)
    for _ in range(3):
        harness.step()
    # Eleven of the sixteen pages are in use, and the request needs seven.
    urgent = make_submit("u", PROMPT[1:29], priority=-1, sampling=TEXT)
    harness.run(urgent)
    assert harness.scheduler.counters.num_preemptions_total == 1
    harness.expect_solo(urgent)
    expect_embedding(harness, embedded)
    assert harness.outputs["e", 0][0].num_cached_tokens == 0
    assert harness.scheduler.counters.prompt_tokens_total == 44 + 28


@pytest.mark.parametrize(
    ("num_pages", "largest", "error"),
    [(12, 48, r"49 tokens.*48"), (4, 16, r"17 tokens.*holds 16")],
    ids=["context", "cache"],
)
def test_embedding_may_fill_context_or_cache(num_pages, largest, error, pooling, depth):
    harness = Harness(depth=depth, max_model_len=48, num_pages=num_pages, page_size=4)
    whole = make_submit("a", PROMPT[:largest], pooling=pooling)
    harness.run(whole)
    expect_embedding(harness, whole)
    with pytest.raises(ContextLengthError, match=error):
        harness.add(make_submit("b", PROMPT[: largest + 1], pooling=pooling))
    with pytest.raises(ContextLengthError):
        harness.add(make_submit("c", PROMPT[:48]))


@pytest.mark.parametrize("place", [0, 20, 39])
def test_non_finite_embedding_fails_alone_and_caches_no_pages(place, pooling, depth):
    harness = Harness(depth=depth, max_num_batched_tokens=16)
    bad = PROMPT[:40]
    bad[place] = POISON_TOKEN_ID
    fine = make_submit("fine", PROMPT[:20], pooling=pooling, salt=b"tenant")
    text = make_submit("text", PROMPT[5:9], sampling=TEXT)
    harness.run(text, make_submit("bad", bad, pooling=pooling), fine)
    finish = harness.finishes["bad", 0]
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "invalid_logits")
    (output,) = harness.outputs["bad", 0]
    assert output.embedding is None
    assert harness.scheduler.counters.invalid_logits_total == 1
    expect_embedding(harness, fine)
    harness.expect_solo(text)
    harness.run(make_submit("again", bad, pooling="last"))
    assert harness.outputs["again", 0][0].num_cached_tokens == 0


def test_embeddings_ignore_sampling_parameters_and_drafts(pooling):
    """Check that sampling parameters on an embedding request change no row and no mask."""
    harness = Harness(speculation=SpeculationConfig(look_up=True, draft_len=96, max_drafts=4))
    sampling = {"max_tokens": 1, "logprobs": 3, "repetition_penalty": 1.5, "min_tokens": 1, "allowed_token_ids": (5, 6)}
    repeated = [7, 8, 9] * 8
    submit = make_submit("a", repeated, pooling=pooling, sampling=sampling)
    text = make_submit("t", repeated, sampling=TEXT)
    harness.run(text, submit)
    expect_embedding(harness, submit)
    harness.expect_solo(text)
    (new,) = [new for plan in harness.executor.plans for new in plan.new_rows if new.row != 0]
    assert not new.sampling.uses_penalties and new.sampling.logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_choices": 2}, "num_choices"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"sampling": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"prediction": [4, 5]}, "prediction"),
        ({"num_prompt_tokens": 3}, "num_prompt_tokens"),
    ],
)
def test_unsupported_embedding_field_is_refused_by_name(fields, param):
    limits = SubmitLimits(("fake",), VOCAB_SIZE)
    validate_submit(make_submit("a", [5, 6, 7, 8], **fields), limits)
    with pytest.raises(InvalidRequestError, match=param) as error:
        validate_submit(make_submit("a", [5, 6, 7, 8], pooling="last", **fields), limits)
    assert error.value.param == param
    validate_submit(make_submit("a", [5, 6, 7, 8], pooling="last"), limits)


def test_embedding_without_tokens_is_refused():
    embedding = Embedding("mean")
    with pytest.raises(RuntimeError, match="nothing"):
        embedding.vector()
