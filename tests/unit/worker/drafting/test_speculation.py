"""Proposals of one request, and acceptance learned from the tokens that arrive."""

from __future__ import annotations

import random

import pytest

from shared.messages import DraftCounts
from worker.drafting.proposal import Acceptance, Proposal, Source
from worker.drafting.speculation import Speculation


class Text(Speculation):
    """Speculation state together with the text it belongs to."""

    def __init__(self, token_ids, *, prediction=(), look_up=True, num_prompt_tokens=None, acceptance=None) -> None:
        self.tokens = list(token_ids)
        num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        acceptance = acceptance or Acceptance()
        super().__init__(self.tokens, num_prompt_tokens, prediction, look_up=look_up, acceptance=acceptance)

    def append(self, *token_ids: int) -> None:
        self.tokens += token_ids


def test_proposal_can_be_truncated():
    proposal = Proposal([1, 2, 3], Source.LOOKUP, 0.5)
    assert proposal.first(2) == Proposal([1, 2], Source.LOOKUP, 0.5)
    assert proposal.expected == 0.875
    assert proposal.first(5) is proposal
    assert proposal.first(0) is None


def test_proposal_source_order_is_prediction_lookup_draft_model():
    prompt = [1, 2, 3, 4, 9, 1, 2]
    speculation = Text(prompt, prediction=[5, 6, 7, 8])
    speculation.append(5, 6, 7)
    assert speculation.propose(4).source is Source.PREDICTION
    assert Text(prompt).propose(2).token_ids == [3, 4]
    assert Text(prompt).propose(0) is None
    drafting = Text([1, 2, 3])
    drafting.set_drafted([7, 8, 9])
    proposal = drafting.propose(2)
    assert (proposal.source, list(proposal.token_ids)) == (Source.DRAFT_MODEL, [7, 8])
    assert len(drafting.propose(8).token_ids) == 3


def test_uncertain_prediction_yields_to_better_lookup():
    line = list(range(100, 140))
    speculation = Text([*line, 7, *line[:20]], prediction=[line[18], line[19], 500, 501])
    speculation.append(*line[20:24])
    assert speculation.propose(3).source in (Source.LOOKUP, Source.REPETITION)


def test_draft_tokens_are_cleared_when_a_token_arrives():
    speculation = Text([1, 2, 3], look_up=False)
    speculation.set_drafted([7, 8])
    speculation.append(7)
    assert speculation.propose(4) is None
    speculation.set_drafted([])
    assert speculation.propose(4) is None


def test_learning_is_independent_of_tokens_per_update():
    rng = random.Random(3)
    text = [rng.randrange(6) for _ in range(400)]
    often = Text(text[:50], prediction=text[200:260], acceptance=Acceptance())
    seldom = Text(text[:50], prediction=text[200:260], acceptance=Acceptance())
    for begin in range(50, 380, 11):
        proposals = [one.propose(9) for one in (often, seldom)]
        assert proposals[0] == proposals[1]
        for one in (often, seldom):
            one.charge(-0.7)
        for token in text[begin : begin + 11]:
            often.append(token)
            often.draft_chance()
            seldom.append(token)
        assert often.credit == pytest.approx(seldom.credit)
        assert often.is_often_wrong == seldom.is_often_wrong
    assert often.credit < 0.0
    assert often.is_promising == seldom.is_promising


def test_tokens_before_the_first_proposal_count():
    speculation = Text([1, 2, 3, 4, 5])
    speculation.append(9, 1, 2)
    assert speculation.propose(3).token_ids == [3, 4, 5]
    # A prompt, and the tokens generated before the request was resumed here.
    resumed = Text([1, 2, 3, 50, 51], num_prompt_tokens=3, prediction=[50, 51, 52, 53])
    assert resumed.propose(2).token_ids == [52, 53]


def test_counts_cover_verified_drafts():
    speculation = Text([1, 2, 1, 2])
    speculation.resolve(4, 3)
    speculation.resolve(2, 0)
    assert (speculation.num_drafted, speculation.num_accepted) == (6, 3)
    assert speculation.draft_counts == DraftCounts(num_accepted=3, num_rejected=3)


def test_acceptance_is_learned_from_unverified_proposals():
    acceptance = Acceptance()
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(300)]
    quoting = Text(prompt + prompt[:20], acceptance=acceptance)
    lying = Text(prompt + prompt[:20], acceptance=acceptance)
    for step in range(60):
        quoting.propose(7)
        lying.propose(7)
        quoting.append(prompt[20 + step])
        # Follows the prediction for two tokens, then leaves it.
        lying.append(prompt[3 * step + (step % 3)] if step % 3 else 5000 + step)
    lying.append(*prompt[:2])
    assert quoting.propose(7).chance > 0.8
    assert lying.propose(7).chance < 0.6


def test_acceptance_follows_changes_in_predictability():
    request = Acceptance(Acceptance())

    def after(num: int, rate: float) -> float:
        rng = random.Random(5)
        for _ in range(num):
            request.observe(Source.LOOKUP, rng.random() < rate)
        return request.chance(Source.LOOKUP)

    assert after(30, 0.95) > 0.7
    assert after(30, 0.02) < 0.3
    assert after(30, 0.95) > 0.7


def test_new_requests_start_from_acceptance_of_others():
    acceptance = Acceptance()
    seen = Acceptance(acceptance)
    before = Acceptance(acceptance).chance(Source.LOOKUP)
    for _ in range(200):
        seen.observe(Source.LOOKUP, False)
    assert Acceptance(acceptance).chance(Source.LOOKUP) < 0.3 * before
    # Nothing was learned about other sources.
    assert Acceptance(acceptance).chance(Source.DRAFT_MODEL) == Acceptance(Acceptance()).chance(Source.DRAFT_MODEL)
