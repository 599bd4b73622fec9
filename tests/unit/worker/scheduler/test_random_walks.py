"""Random loads compared with solo runs: each text equals its solo text, and all pages are freed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import FinishReason, Submit
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import generate

_PREFIXES = [[3 + (7 * index + step) % 90 for step in range(length)] for index, length in enumerate((5, 16, 30))]


def _random_submit(rng: random.Random, number: int, max_model_len: int) -> Submit:
    prompt = list(rng.choice(_PREFIXES)) if rng.random() < 0.7 else []
    prompt += [rng.randrange(3, 96) for _ in range(rng.randrange(1, 20))]
    num_prompt_tokens = len(prompt)
    max_tokens = rng.randrange(1, 30)
    sampling: dict[str, object] = {"seed": rng.randrange(3), "max_tokens": max_tokens, "ignore_eos": rng.random() < 0.3}
    if rng.random() < 0.2:
        sampling["stop_token_ids"] = tuple(rng.randrange(3, 96) for _ in range(3))
    elif rng.random() < 0.3:
        sampling["min_tokens"] = rng.randrange(max_tokens + 1)
    if rng.random() < 0.15:
        sampling["prompt_logprobs"] = 2
    if rng.random() < 0.2:
        sampling["logprobs"] = 1
    submit = make_submit(
        f"r{number}",
        prompt,
        sampling=sampling,
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        priority=rng.choice((0, 0, 0, -1, 2)),
        salt=rng.choice((b"", b"", b"tenant")),
    )
    if rng.random() < 0.15:
        # Resumed: the tokens already emitted follow the prompt.
        emitted = generate(prompt, submit.sampling, 0, max_model_len)[: rng.randrange(1, 8)]
        return make_submit(
            f"r{number}", prompt + emitted, num_prompt_tokens=num_prompt_tokens, sampling=submit.sampling
        )
    return submit


def run_walk(seed: int, num_requests: int = 24, **options) -> Harness:
    rng = random.Random(seed)
    harness = Harness(**options)
    submits: dict[str, Submit] = {}
    aborted: set[tuple[str, int]] = set()
    for number in range(num_requests):
        submit = _random_submit(rng, number, harness.scheduler.config.max_model_len)
        submits[submit.request_id] = submit
        harness.add(submit)
        for _ in range(rng.choice((0, 0, 1, 2, 6))):
            harness.step(milliseconds=rng.choice((1.0, 30.0)))
        if rng.random() < 0.25:
            victim = submits[f"r{rng.randrange(number + 1)}"]
            choice = rng.choice((None, rng.randrange(victim.num_choices)))
            harness.abort(victim.request_id, choice)
            aborted |= {(victim.request_id, index) for index in range(victim.num_choices) if choice in (None, index)}
    harness.drain()
    for submit in submits.values():
        _check_texts(harness, submit, aborted)
    return harness


def _check_texts(harness: Harness, submit: Submit, aborted: set[tuple[str, int]]) -> None:
    limit = harness.scheduler.config.max_model_len
    for choice in range(submit.num_choices):
        key = (submit.request_id, choice)
        text = generate(submit.token_ids, submit.sampling, choice, limit, submit.num_prompt_tokens)
        assert key in harness.finishes
        if harness.finishes[key].reason is FinishReason.ABORT:
            assert key in aborted
            assert harness.tokens[key] == text[: len(harness.tokens[key])]
        else:
            assert harness.finishes[key].reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert harness.tokens[key] == text
        if submit.sampling.logprobs is not None:
            entries = [entry for output in harness.outputs[key] for entry in output.logprobs or []]
            assert [entry.token_id for entry in entries] == harness.tokens[key]
        reports = [output.prompt_logprobs for output in harness.outputs[key] if output.prompt_logprobs is not None]
        wanted = submit.sampling.prompt_logprobs is not None and choice == 0
        # An abort may arrive before the report is complete, or between the report and the first token.
        assert len(reports) == wanted or (wanted and not harness.tokens[key])
        for report in reports:
            assert [entry.token_id for entry in report] == submit.token_ids[: submit.num_prompt_tokens]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_texts_equal_solo_texts_with_enough_pages(seed, depth, caching):
    harness = run_walk(seed, depth=depth, num_pages=200, enable_prefix_caching=caching)
    assert harness.scheduler.counters.generation_tokens_total > 0


def test_few_page_walks_preempt():
    walks = [run_walk(seed, depth=1 + seed % 2, num_pages=24, max_num_seqs=6) for seed in range(8)]
    assert sum(walk.scheduler.counters.num_preemptions_total for walk in walks) >= 10
    assert sum(walk.kv.num_evictions for walk in walks) >= 10


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_texts_equal_solo_texts_with_few_pages(seed, depth, num_groups):
    run_walk(seed, depth=depth, num_groups=num_groups, num_pages=24, max_num_seqs=6)


CONFIGURATIONS = {
    "seed": st.integers(0, 2**32),
    "depth": st.sampled_from((1, 2, 3)),
    "num_pages": st.integers(24, 60),
    "page_size": st.sampled_from((1, 4, 16)),
    "max_num_seqs": st.integers(1, 8),
    "max_num_batched_tokens": st.integers(16, 64),
    "enable_prefix_caching": st.booleans(),
}


@given(**CONFIGURATIONS)
def test_random_engine_configurations_give_the_same_texts(seed, page_size, num_pages, **options):
    # The cache holds as many tokens as the largest request has, for every page size.
    pages = max(num_pages, 96) if page_size == 1 else num_pages
    run_walk(seed, 10, page_size=page_size, num_pages=pages, **options)
