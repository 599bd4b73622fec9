"""Speculative decoding in the scheduler: every text equals the text without drafts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shared.messages import FinishReason
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import VOCAB_SIZE, generate
from tests.fakes.fake_grammars import FakeGrammars
from tests.fakes.guessing import MAX_DRAFTS, Guesses, speculation
from tests.unit.worker.scheduler.test_constraints import NINE, make_constraints
from worker.drafting.proposal import Proposal, Source
from worker.plan import StepPlan
from worker.scheduler.plan_builder import PlannedStep

PROMPT = [11, 12, 13, 14, 15]


class GuessingHarness(Harness):
    def __init__(self, seed: int = 0, *, skill: float = 0.7, **options) -> None:
        super().__init__(speculation=speculation(), **options)
        self.guesses = Guesses(self, seed, skill=skill)
        self.plans: list[StepPlan] = self.executor.plans

    @property
    def num_verified(self) -> int:
        return self.scheduler.counters.spec_decode_num_draft_tokens_total


def test_rejection_sampling_draws_nothing_with_a_grammar():
    """Check that rejection sampling draws nothing for a text with a grammar.

    The cut made by the grammar would otherwise depend on the draw, and the replacement token on the same noise.
    """
    grammars = FakeGrammars(VOCAB_SIZE)
    for rejection in (False, True):
        harness = Harness(constraints=make_constraints(grammars), speculation=speculation(64, rejection=rejection))
        Guesses(harness, 1, draft_model=True)
        sampling = {"max_tokens": 9, "ignore_eos": True}
        harness.run(make_submit("r", PROMPT, grammar=NINE, sampling=sampling))
        drafted = [row for plan in harness.executor.plans for row in plan.drafting]
        assert bool(drafted) is not rejection
        harness.run(make_submit("free", PROMPT, sampling=sampling))
        assert len([row for plan in harness.executor.plans for row in plan.drafting]) > len(drafted)


def guess_by_five(request, limit):
    """Guess the residues that the grammars here permit."""
    done = len(request.token_ids) - len(PROMPT)
    return Proposal([5 + (done + place) % 5 for place in range(limit)], Source.LOOKUP, 0.5)


def test_truncated_drafts_are_not_counted_in_step_cost(monkeypatch):
    """Check that the measured cost of a step counts only the rows that the step computed."""
    harness = Harness(constraints=make_constraints(FakeGrammars(VOCAB_SIZE)), speculation=speculation())
    Guesses(harness, 1, skill=0.0)
    observed: list[int] = []
    cuts: list[int] = []
    cut = PlannedStep.cut

    def cut_and_count(planned, request, count):
        cuts.append(count)
        cut(planned, request, count)

    monkeypatch.setattr(PlannedStep, "cut", cut_and_count)
    monkeypatch.setattr(harness.scheduler._speculator, "observe", lambda num_rows, _: observed.append(num_rows))

    # The grammar allows exactly these nine tokens and then ends; nothing may be sampled there.
    monkeypatch.setattr(harness.scheduler._speculator, "_guess", guess_by_five)
    for number in range(8):
        sampling = {"max_tokens": 20, "ignore_eos": True, "seed": number}
        harness.add(make_submit(f"r{number}", PROMPT, grammar=NINE, sampling=sampling))
    harness.drain()
    assert cuts
    plans = [plan for plan in harness.executor.plans if all(item.start >= len(PROMPT) for item in plan.scheduled)]
    assert observed == [plan.num_tokens for plan in plans]
    assert harness.scheduler.counters.step_tokens_total == sum(plan.num_tokens for plan in harness.executor.plans)


def test_always_rejected_drafts_stop_costing_grammar_masks(monkeypatch):
    """Check that drafts that are always rejected stop costing grammar masks.

    Each mask may create lexer states, whose number is limited.
    """
    options = {"max_num_seqs": 1, "max_model_len": 1000, "num_pages": 500, "max_num_batched_tokens": 64}
    harness = Harness(constraints=make_constraints(FakeGrammars(VOCAB_SIZE)), speculation=speculation(), **options)
    Guesses(harness, 1)

    speculator = harness.scheduler._speculator
    monkeypatch.setattr(speculator, "_guess", guess_by_five)
    monkeypatch.setattr(speculator._policy, "choose", lambda found, *_: [MAX_DRAFTS if one else 0 for one in found])
    sampling = {"max_tokens": 600, "ignore_eos": True, "seed": 3}
    finish, tokens = finished(harness, grammar="mod 5 for 500", sampling=sampling)
    assert finish.reason is FinishReason.STOP and len(tokens) == 500
    counters = harness.scheduler.counters
    wrong = counters.spec_decode_num_draft_tokens_total - counters.spec_decode_num_accepted_tokens_total
    assert 250 < wrong <= 128 + 0.5 * 500 + MAX_DRAFTS
    assert counters.spec_decode_num_accepted_tokens_total > 0


def finished(harness: Harness, name: str = "r", **fields):
    harness.run(make_submit(name, PROMPT, **fields))
    return harness.finishes[name, 0], harness.tokens[name, 0]


class _Certain(random.Random):
    """Random generator that accepts every draft and chooses the greatest draft length."""

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


def test_always_accepted_drafts_reduce_steps():
    harness = always_right()
    sampling = {"max_tokens": 31, "ignore_eos": True, "seed": 5, "logprobs": 1}
    finish, tokens = finished(harness, sampling=sampling)
    assert finish.reason is FinishReason.LENGTH and len(tokens) == 31
    # The prompt's step gives one token; five steps give six each.
    assert len(harness.plans) == 6
    plain = Harness()
    assert finished(plain, sampling=sampling) == (finish, tokens)
    counters = harness.scheduler.counters
    assert counters.spec_decode_num_accepted_tokens_total == counters.spec_decode_num_draft_tokens_total == 25
    assert counters.accepted_per_position[:MAX_DRAFTS] == [5] * MAX_DRAFTS
    outputs = harness.outputs["r", 0]
    assert (outputs[-1].drafts.num_accepted, outputs[-1].drafts.num_rejected) == (25, 0)
    # The verified tokens of a step arrive in one output.
    assert [len(output.token_ids) for output in outputs] == [1, *[1 + MAX_DRAFTS] * 5]
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)


def test_drafts_stay_within_remaining_token_limit():
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
    ids=["default", "disabled", "mirostat"],
)
def test_which_requests_get_drafts(fields, drafts):
    harness = GuessingHarness(skill=1.0)
    sampling = {"max_tokens": 20, "ignore_eos": True} | fields.pop("sampling", {})
    finished(harness, sampling=sampling, **fields)
    assert (harness.num_verified > 0) == drafts
    assert (harness.outputs["r", 0][-1].drafts is not None) == drafts


@pytest.mark.parametrize(("num_requests", "identical_rows"), [(8, 32), (4, 6)], ids=["budget", "identical rows"])
def test_drafts_stay_within_token_budget_and_bitwise_identical_rows(num_requests, identical_rows):
    harness = GuessingHarness(skill=1.0, max_num_seqs=8, max_num_batched_tokens=16, num_pages=200)
    speculator = harness.scheduler._speculator
    speculator._config = dataclasses.replace(speculator._config, max_bitwise_identical_rows=identical_rows)
    for number in range(num_requests):
        harness.add(make_submit(f"r{number}", PROMPT, sampling={"max_tokens": 20, "ignore_eos": True, "seed": number}))
    harness.drain()
    sizes = [plan.num_tokens for plan in harness.plans if all(item.start >= len(PROMPT) for item in plan.scheduled)]
    assert max(sizes) == min(16, identical_rows)


def test_prompts_progress_beside_many_drafts():
    harness = always_right(max_num_seqs=4, max_num_batched_tokens=16, num_pages=200)
    long = {"max_tokens": 80, "ignore_eos": True}
    for number in range(3):
        harness.add(make_submit(f"r{number}", PROMPT, sampling=long | {"seed": number}))
    while not all(harness.tokens[f"r{number}", 0] for number in range(3)):
        harness.step()
    harness.add(make_submit("late", list(range(3, 33)), sampling={"max_tokens": 2, "ignore_eos": True}))
    for _ in range(6):
        harness.step()
    assert harness.tokens["late", 0]
    assert set(harness.finishes) <= {("late", 0)}
    assert harness.num_verified > 0
    harness.drain()


def test_unusable_row_without_drafts_fails():
    harness = always_right(corrupt=lambda plan: {0} if plan.step >= 2 else set())
    finish, tokens = finished(harness, sampling={"max_tokens": 30, "ignore_eos": True})
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "invalid_logits")
    assert tokens == generate(PROMPT, make_submit("r", PROMPT).sampling, 0, 96)[: len(tokens)]
    assert harness.scheduler.counters.invalid_logits_total == 1
    assert harness.kv.num_cached <= 1


def test_drafts_without_free_pages_are_omitted():
    harness = GuessingHarness(skill=1.0, num_pages=4, max_model_len=16, max_num_seqs=1)
    finish, tokens = finished(harness, sampling={"max_tokens": 11, "ignore_eos": True})
    assert finish.reason is FinishReason.LENGTH and len(tokens) == 11
    assert harness.scheduler.counters.num_preemptions_total == 0


@pytest.mark.parametrize(
    ("seed", "num_pages", "lengths"),
    [
        (7, 12, [(6, 7), (7, 23), (1, 5), (2, 14)]),
        (48, 13, [(6, 7), (5, 19), (4, 16), (3, 7)]),
        (65, 19, [(7, 12), (5, 19), (4, 17), (8, 19)]),
        (125, 16, [(4, 10), (5, 21), (3, 14), (3, 22)]),
    ],
)
def test_drafts_leave_one_page_per_other_request(seed, num_pages, lengths):
    """Check that drafts never take pages that another request needs, for just enough pages and any order of ends."""
    options = {"num_pages": num_pages, "max_num_seqs": 4}
    for harness in (Harness(**options), guessing := GuessingHarness(seed, skill=1.0, **options)):
        for number, (num_prompt, max_tokens) in enumerate(lengths):
            sampling = {"max_tokens": max_tokens, "ignore_eos": True, "seed": number}
            harness.add(make_submit(f"r{number}", [20 + number, *([11] * num_prompt)], sampling=sampling))
        harness.drain()
        assert harness.scheduler.counters.num_preemptions_total == 0
    assert guessing.num_verified > 0
