"""Drafts, right and wrong, verified several at a time: whatever is guessed, every text is the text without."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import FinishReason
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.guessing import MAX_DRAFTS, Guesses, speculation
from tests.unit.worker.scheduler.test_constraints import GrammarWalk
from tests.unit.worker.scheduler.test_random_walks import _walk
from worker.scheduler.plan import StepPlan

PROMPT = [11, 12, 13, 14, 15]


class GuessingHarness(Harness):
    def __init__(self, seed: int = 0, *, skill: float = 0.7, draft_model: bool = False, **options) -> None:
        super().__init__(speculation=speculation(64 if draft_model else 0), **options)
        self.guesses = Guesses(self, seed, skill=skill, draft_model=draft_model)
        self.plans: list[StepPlan] = self.executor.plans

    @property
    def num_verified(self) -> int:
        return self.scheduler.counters.spec_decode_num_draft_tokens_total


def walk(monkeypatch, seed, *, skill=0.7, draft_model=False, **options):
    """test_random_walks, guessing."""
    monkeypatch.setattr(
        "tests.unit.worker.scheduler.test_random_walks.Harness",
        lambda **kwargs: GuessingHarness(seed, skill=skill, draft_model=draft_model, **kwargs),
    )
    return _walk(seed, **options)


@pytest.mark.parametrize("draft_model", [False, True], ids=["guesses", "draft model"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_pages", [200, 24], ids=["enough pages", "few pages"])
@pytest.mark.parametrize("seed", range(4))
def test_texts_equal_solo_texts(seed, num_pages, depth, draft_model, monkeypatch):
    harness = walk(
        monkeypatch, seed, depth=depth, num_pages=num_pages, num_groups=1 + seed % 2, draft_model=draft_model
    )
    counters = harness.scheduler.counters
    assert 0 < counters.spec_decode_num_accepted_tokens_total < counters.spec_decode_num_draft_tokens_total
    assert sum(counters.accepted_per_position) == counters.spec_decode_num_accepted_tokens_total
    drafting = [row for plan in harness.plans for row in plan.drafting]
    assert bool(drafting) == draft_model


@given(
    seed=st.integers(0, 2**32),
    skill=st.sampled_from((0.0, 0.7, 1.0)),
    draft_model=st.booleans(),
    depth=st.sampled_from((1, 2, 3)),
    num_pages=st.integers(24, 60),
    page_size=st.sampled_from((1, 4, 16)),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(16, 64),
    enable_prefix_caching=st.booleans(),
)
def test_any_shape_of_engine_gives_the_same_texts(seed, page_size, num_pages, **options):
    pages = max(num_pages, 96) if page_size == 1 else num_pages
    with pytest.MonkeyPatch.context() as monkeypatch:
        walk(monkeypatch, seed, num_requests=10, page_size=page_size, num_pages=pages, **options)


class GuessingGrammarWalk(GrammarWalk):
    """Grammars, aborts, gateways that vanish, steps that fail, and guesses in flight meanwhile."""

    def __init__(self, seed: int, **options) -> None:
        super().__init__(seed, speculation=speculation(64), **options)
        Guesses(self.harness, seed, draft_model=seed % 2 == 1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_choice_ends_once(seed, depth):
    run = GuessingGrammarWalk(seed, depth=depth, num_pages=20, max_num_seqs=5)
    run.run(40)
    assert run.grammars.num_pending == 0
    assert run.harness.scheduler.counters.spec_decode_num_accepted_tokens_total > 0


def finished(harness: Harness, name: str = "r", **fields):
    harness.add(make_submit(name, PROMPT, **fields))
    harness.drain()
    return harness.finishes[name, 0], harness.tokens[name, 0]


class _Certain(random.Random):
    """Random numbers that make every guess right, and as long as it may be."""

    def random(self) -> float:
        return 0.5

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return start - 1

    def choice(self, options):
        return options[1]


def always_right(**options) -> GuessingHarness:
    harness = GuessingHarness(skill=1.0, **options)
    harness.guesses._rng = _Certain()
    return harness


def test_a_guess_that_is_always_right_takes_few_steps():
    harness = always_right()
    sampling = {"max_tokens": 31, "ignore_eos": True, "seed": 5}
    finish, tokens = finished(harness, sampling=sampling)
    assert finish.reason is FinishReason.LENGTH and len(tokens) == 31
    # The prompt's step gives a token, five give six each.
    assert len(harness.plans) == 6
    plain = Harness()
    assert finished(plain, sampling=sampling) == (finish, tokens)
    counters = harness.scheduler.counters
    assert counters.spec_decode_num_accepted_tokens_total == counters.spec_decode_num_draft_tokens_total == 25
    assert counters.accepted_per_position[:MAX_DRAFTS] == [5] * MAX_DRAFTS
    assert (harness.outputs["r", 0][-1].drafts.num_accepted, harness.outputs["r", 0][-1].drafts.num_rejected) == (25, 0)


def test_no_draft_goes_beyond_what_the_request_may_still_generate():
    for max_tokens in range(1, 10):
        harness = GuessingHarness(max_tokens, skill=1.0)
        finish, tokens = finished(harness, sampling={"max_tokens": max_tokens, "ignore_eos": True})
        assert finish.reason is FinishReason.LENGTH and len(tokens) == max_tokens
        assert all(
            item.start + item.count < len(PROMPT) + max_tokens for plan in harness.plans for item in plan.scheduled
        )


@pytest.mark.parametrize(
    ("fields", "drafts"),
    [({}, True), ({"speculative": False}, False), ({"sampling": {"mirostat": 2, "temperature": 1.0}}, False)],
    ids=["as usual", "not wanted", "mirostat"],
)
def test_who_gets_drafts(fields, drafts):
    harness = GuessingHarness(skill=1.0)
    sampling = {"max_tokens": 20, "ignore_eos": True} | fields.pop("sampling", {})
    finished(harness, sampling=sampling, **fields)
    assert (harness.num_verified > 0) == drafts
    assert (harness.outputs["r", 0][-1].drafts is not None) == drafts


def test_a_step_takes_no_more_tokens_than_it_may():
    harness = GuessingHarness(skill=1.0, max_num_seqs=8, max_num_batched_tokens=16, num_pages=200)
    for number in range(8):
        harness.add(make_submit(f"r{number}", PROMPT, sampling={"max_tokens": 20, "ignore_eos": True, "seed": number}))
    harness.drain()
    sizes = Counter(plan.num_tokens for plan in harness.plans)
    assert max(sizes) == 16


def test_drafts_that_have_no_pages_are_left_out():
    harness = GuessingHarness(skill=1.0, num_pages=4, max_model_len=16, max_num_seqs=1)
    finish, tokens = finished(harness, sampling={"max_tokens": 11, "ignore_eos": True})
    assert finish.reason is FinishReason.LENGTH and len(tokens) == 11
    assert harness.scheduler.counters.num_preemptions_total == 0


def test_news_of_a_verification_is_one_message():
    harness = always_right()
    finished(harness, sampling={"max_tokens": 24, "ignore_eos": True, "logprobs": 1})
    outputs = harness.outputs["r", 0]
    assert len(outputs) == len(harness.plans)
    assert max(len(output.token_ids) for output in outputs) == 1 + MAX_DRAFTS
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
