"""Sampling parameters of single rows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.test_extended import model
from tests.unit.worker.sampling.helpers import SmallSampler, assert_distribution, logits_like
from worker.plan import ScheduledTokens, StepPlan


@pytest.mark.parametrize(
    ("sampling", "spread"),
    [
        ({"temperature": 1.0}, 1.5),
        ({"temperature": 0.5}, 1.5),
        ({"temperature": 1.7}, 1.5),
        ({"temperature": 1.0, "top_k": 7}, 1.5),
        ({"temperature": 0.8, "top_p": 0.8}, 1.5),
        ({"temperature": 1.2, "min_p": 0.08}, 1.5),
        ({"temperature": 1.2, "min_p": 0.02, "top_k": 12, "top_p": 0.9}, 1.5),
        ({"temperature": 0.9, "typical_p": 0.6}, 1.5),
        ({"temperature": 1.0, "xtc_probability": 0.3, "xtc_threshold": 0.04}, 1.5),
        ({"temperature": 1.0, "dynatemp_range": 0.6, "dynatemp_exponent": 1.5}, 0.3),
        ({"temperature": 1.0, "dynatemp_range": 0.6, "dynatemp_exponent": 1.5}, 3.0),
        ({"temperature": 1.3, "top_n_sigma": 1.2}, 1.5),
    ],
    ids=str,
)
def test_tokens_have_the_distribution_of_their_parameters(sampling, spread, ops):
    row = logits_like(3, spread=spread)
    expected = np.zeros(40)
    probability = sampling.get("xtc_probability", 0.0)
    for coin, share in ((0.0, probability), (1.0, 1 - probability)):
        kept, _ = model(row[0].tolist(), sampling, coin)
        weights = {token: math.exp(logit) for token, logit in kept.items()}
        for token, weight in weights.items():
            expected[token] += share * weight / sum(weights.values())
    assert_distribution(ops, row, expected, **sampling)


@pytest.mark.parametrize("sampling", [{}, {"xtc_probability": 0.5, "xtc_threshold": 0.02}], ids=str)
def test_tokens_depend_on_seed_and_choice(sampling, ops):
    small = SmallSampler(ops=ops)
    for row, (seed, choice) in enumerate([(42, 0), (42, 0), (42, 1), (43, 0), (-42, 0), (42 + 2**32, 0)]):
        small.add(row, seed=seed, choice=choice, **sampling)
    row = logits_like(1, spread=0.5).expand(60, -1).contiguous()
    streams = [small.ids(row, [i] * 60, list(range(60))) for i in range(6)]
    assert streams[0] == streams[1]
    for other in streams[2:]:
        assert sum(a == b for a, b in zip(streams[0], other)) < 15


def test_greedy_selects_the_lowest_id_of_equal_logits(ops):
    small = SmallSampler(ops=ops)
    small.add(0, temperature=0.0)
    small.add(1, temperature=1e-6)
    small.add(2, temperature=1.0, top_k=1)
    logits = torch.zeros(3, 40)
    logits[:, 11] = logits[:, 30] = 4.0
    assert small.ids(logits, [0, 1, 2], [3, 3, 3]) == [11, 11, 11]


def test_logit_bias_bans_and_forces(ops):
    small = SmallSampler(ops=ops)
    small.add(0, temperature=0.0, logit_bias={5: -100.0, 6: 3.0})
    small.add(1, temperature=0.0)
    logits = torch.zeros(2, 40)
    logits[:, 5], logits[:, 8] = 9.0, 2.0
    assert small.ids(logits, [0, 1], [3, 3]) == [6, 5]
    small.add(0, temperature=0.0)
    assert small.ids(logits, [0, 1], [3, 3]) == [5, 5]


def test_min_tokens_masks_end_and_stop_ids_until_reached(ops):
    small = SmallSampler(ops=ops)
    small.add(0, token_ids=[9] * 4, eos=[2, 3], temperature=0.0, min_tokens=3, stop_token_ids=(8,))
    logits = torch.zeros(1, 40)
    logits[0, 2], logits[0, 8], logits[0, 3], logits[0, 12] = 9.0, 8.0, 7.0, 1.0
    # Positions 4, 5 and 6 hold generated tokens 1 to 3.
    assert [small.ids(logits, [0], [position]) for position in (4, 5, 6, 7)] == [[12], [12], [12], [2]]


def test_ignore_eos_masks_end_ids_but_not_stop_ids(ops):
    small = SmallSampler(ops=ops)
    small.add(0, eos=[2, 3], temperature=0.0, ignore_eos=True, stop_token_ids=(3, 8))
    logits = torch.zeros(1, 40)
    logits[0, 2], logits[0, 3], logits[0, 8] = 9.0, 8.0, 7.0
    assert small.ids(logits, [0], [90]) == [3]


def test_penalties_count_prompt_output_and_what_is_sampled(ops):
    small = SmallSampler(ops=ops)
    small.add(0, token_ids=[4, 5], num_prompt_tokens=1, temperature=0.0, frequency_penalty=1.0)
    logits = torch.zeros(1, 40)
    logits[0, 5], logits[0, 6], logits[0, 4] = 2.5, 2.0, 1.2
    # 5 was generated before (2.5 - 1); sampled tokens lose value; the 4 of the prompt is not penalized.
    assert [small.ids(logits, [0], [position])[0] for position in range(2, 6)] == [6, 5, 4, 6]


def test_repetition_penalty_covers_the_prompt(ops):
    small = SmallSampler(ops=ops)
    small.add(0, token_ids=[4], temperature=0.0, repetition_penalty=2.0)
    logits = torch.full((1, 40), -9.0)
    logits[0, 4], logits[0, 6] = -1.0, -1.5
    assert small.ids(logits, [0], [1]) == [6]


def test_a_new_request_resets_its_row(ops):
    small = SmallSampler(ops=ops)
    for _ in range(3):
        small.add(0, token_ids=[4], temperature=0.0, frequency_penalty=2.0)
        logits = torch.zeros(1, 40)
        logits[0, 4], logits[0, 6] = 2.0, 1.0
        assert [small.ids(logits, [0], [position])[0] for position in (1, 2)] == [4, 6]


def test_a_row_whose_every_token_is_masked_fails(ops):
    small = SmallSampler(vocab_size=2, ops=ops)
    small.add(0, token_ids=[0], eos=[0, 1], temperature=0.0, ignore_eos=True)
    assert small.ids(torch.zeros(1, 2), [0], [1]) == [-2]


@pytest.mark.parametrize("by_index", [False, True])
def test_only_tokens_of_the_mask_are_sampled(ops, by_index):
    small = SmallSampler(ops=ops)
    small.add(0, temperature=0.0)
    small.add(1, temperature=1.0, seed=3)
    logits = torch.zeros(2, 40)
    logits[:, 5] = 30.0
    items = [ScheduledTokens(row, 2, 1, True) for row in (0, 1)]
    sampled = small.rows.stage(StepPlan(step=1, scheduled=items)).sampled
    mask = torch.zeros(2, 2, dtype=torch.int32)
    mask[0, 1] = 1 << 6
    mask[1] = -1
    if by_index:
        sampled = replace(sampled, mask=mask[:1], mask_rows=torch.tensor([0, -1]))
    else:
        sampled = replace(sampled, mask=mask)
    assert small.sampler.sample(logits, sampled).token_ids.tolist() == [38, 5]


def test_an_empty_batch(ops):
    small = SmallSampler(ops=ops)
    assert small.ids(torch.zeros(0, 40), np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64).tolist()) == []


def test_the_sampler_reports_raw_log_probabilities_of_selected_rows():
    small = SmallSampler()
    small.add(0, temperature=0.0)
    small.add(1, temperature=0.3, top_k=1, logit_bias={4: 100.0}, logprobs=2)
    small.add(2, temperature=0.0, frequency_penalty=2.0, logprobs=0)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    tokens = small.sample(logits, [0, 1, 2], [3, 3, 3])
    ids, logprobs = tokens.token_ids, tokens.logprobs
    assert logprobs is not None and logprobs.token_ids.tolist() == ids[1:].tolist()
    raw = torch.log_softmax(logits, dim=-1)
    assert ids[1] == 4
    assert logprobs.logprobs[0].item() == pytest.approx(raw[1, 4].item(), abs=1e-5)
