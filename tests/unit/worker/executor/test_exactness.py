"""Speculation does not change what clients observe, including the ranks of log-probabilities.

Drafts are the truth, corrupted now and then, or a draft model's: the target itself, or another one.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from tests.fakes.engine_harness import make_submit
from tests.fakes.guessing import MAX_DRAFTS, Guesses, speculation
from tests.fakes.pairs import pairwise
from tests.fakes.tiny_server import MAX_MODEL_LEN, TinyServer, tiny_spec, tiny_weights
from tests.unit.worker.executor.outcomes import KnownGuesses, all_features, all_features_alone, outcome, run_staggered
from worker.drafting.proposal import Proposal, Source

POSITIONS = MAX_MODEL_LEN
NAMES = ("no drafts", "all right", "some right", "none right", "the same model", "another model")


def guessing(monkeypatch, name: str, texts: dict, seed: int = 0, **options) -> TinyServer:
    models = {"the same model": 0, "another model": 1}
    if name == "no drafts":
        return TinyServer(monkeypatch, **options)
    if name in models:
        server = TinyServer(monkeypatch, speculation=speculation(POSITIONS), draft_seed=models[name], **options)
        Guesses(server, seed, draft_model=True)
    else:
        server = TinyServer(monkeypatch, speculation=speculation(), **options)
        KnownGuesses(server, texts, {"all right": 1.0, "some right": 0.7, "none right": 0.0}[name], seed)
    return server


@pairwise(name=NAMES, num_pages=[120, 30], late=[False, True], windows=[False, True])
def test_what_clients_see_is_what_they_see_without(name, num_pages, late, windows, monkeypatch):
    """CVE-2026-44223, reliability 2.7 #93: all sampling features in one batch, with drafts and preemptions."""
    alone = all_features_alone(windows)
    options = {"late": late, "num_pages": num_pages, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    server = guessing(monkeypatch, name, alone, spec=tiny_spec(windows=windows), **options)
    seen = run_staggered(server, all_features())
    assert {key for key in alone if seen[key] != alone[key]} == set()
    counters = server.scheduler.counters
    assert (counters.num_preemptions_total > 0) == (num_pages == 30)
    assert counters.prefix_cache_hits_total > 0
    if name == "no drafts":
        assert not late or server.num_captured >= 2
        return
    assert counters.spec_decode_num_draft_tokens_total > 10
    share = counters.spec_decode_num_accepted_tokens_total / counters.spec_decode_num_draft_tokens_total
    low, high = {"all right": (1, 1), "none right": (0, 0.05), "another model": (0, 0.3)}.get(name, (0.3, 1.0))
    assert low <= share <= high


@pairwise(name=["some right", "the same model"], seed=range(4), windows=[False, True])
def test_aborts_with_drafts_in_flight_harm_nobody(seed, name, windows, monkeypatch):
    rng = random.Random(seed)
    alone, spec = all_features_alone(windows), tiny_spec(windows=windows)
    server = guessing(monkeypatch, name, alone, seed, spec=spec, num_pages=50, max_num_seqs=5)
    aborted: set[str] = set()
    names = [submit.request_id for submit in all_features()]

    def interrupt() -> None:
        if rng.random() < 0.06:
            aborted.add(victim := rng.choice(names))
            server.abort(victim)

    server.interrupt = interrupt
    for submit in all_features():
        server.add(submit)
        server.step()
    server.drain()
    for key, tokens in server.tokens.items():
        text = alone[key][0]
        assert tokens == (text[: len(tokens)] if key[0] in aborted else text)


def draft_always(monkeypatch, server: TinyServer) -> None:
    """Draft and verify as many tokens as possible."""
    policy = server.scheduler._speculator._policy
    monkeypatch.setattr(policy, "num_to_draft", lambda *_: MAX_DRAFTS)
    monkeypatch.setattr(policy, "catch_up_pays", lambda *_: True)
    monkeypatch.setattr(policy, "choose", lambda proposals, *_: [len(p.token_ids) if p else 0 for p in proposals])


def texts_of_many_seeds(server: TinyServer, count: int, first_seed: int) -> list[list[int]]:
    sampling = {"temperature": 1.3, "top_p": 0.9, "max_tokens": 4, "ignore_eos": True}
    for number in range(count):
        server.add(make_submit(f"r{number}", [11, 12, 13, 14], sampling=sampling | {"seed": first_seed + number}))
    server.drain()
    return [server.tokens[f"r{number}", 0] for number in range(count)]


@pytest.mark.parametrize("draft_seed", [0, 1], ids=["the same model", "another model"])
def test_rejection_leaves_every_token_its_distribution(draft_seed, monkeypatch):
    count = 640
    options = {"late": False, "num_pages": 1200, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    server = TinyServer(
        monkeypatch, speculation=speculation(POSITIONS, rejection=True), draft_seed=draft_seed, **options
    )
    draft_always(monkeypatch, server)
    mine = texts_of_many_seeds(server, count, 0)
    others = texts_of_many_seeds(TinyServer(monkeypatch, **options), count, count)
    # Distributions are dropped when their drafts are verified.
    assert server.runner._rows.distributions._by_row == {}
    counters = server.scheduler.counters
    share = counters.spec_decode_num_accepted_tokens_total / counters.spec_decode_num_draft_tokens_total
    assert share > 0.8 if draft_seed == 0 else 0.1 < share < 0.8
    for place in range(1, 4):
        assert two_samples_agree([text[place] for text in mine], [text[place] for text in others])
    pairs = [[96 * text[1] + text[2] for text in texts] for texts in (mine, others)]
    assert two_samples_agree(*pairs)


def two_samples_agree(ours: list[int], theirs: list[int]) -> bool:
    """Apply Pearson's chi-squared test of homogeneity at level 1e-4, with rare values combined."""
    both = Counter(ours) + Counter(theirs)
    usual = [value for value, number in both.items() if number >= 16]
    tables = []
    for sample in (ours, theirs):
        counted = Counter(sample)
        rest = len(sample) - sum(counted[value] for value in usual)
        tables.append([*(counted[value] for value in usual), rest])
    columns = [pair for pair in zip(*tables) if sum(pair)]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in columns)  # of samples of the same size
    freedom = len(columns) - 1
    # Wilson and Hilferty 1931: the cube root is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return z < 3.72


BROKEN = 95
"""Token whose keys and values are not finite. It is never sampled."""


def with_broken_token(spec, seed=0):
    weights = tiny_weights(spec, seed)
    weights.tensors["head.weight"] = weights.tensors["embed.weight"].clone()
    weights.tensors["embed.weight"][BROKEN] = float("nan")
    return weights


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_non_finite_drafts_do_not_affect_other_tokens(late, monkeypatch):
    """Earlier tokens of the same step, which give them weight zero, are not affected either."""
    monkeypatch.setattr("tests.fakes.tiny_server.tiny_weights", with_broken_token)
    options = {"late": late, "spec": dataclasses.replace(tiny_spec(), tie_word_embeddings=False), "num_pages": 120}
    sampling = {"logit_bias": {BROKEN: -100.0}, "max_tokens": 12, "ignore_eos": True}
    plain, server = TinyServer(monkeypatch, **options), TinyServer(monkeypatch, speculation=speculation(), **options)
    Guesses(server, 0)
    monkeypatch.setattr(
        server.scheduler._speculator,
        "_guess",
        lambda _, limit: Proposal([BROKEN] * limit, Source.LOOKUP, 0.9),
    )
    guessed = server.scheduler.counters
    for one in (plain, server):
        for number in range(4):
            one.add(make_submit(f"r{number}", [11, 12, 13 + number], sampling=sampling | {"seed": number}))
        one.drain()
    assert outcome(server) == outcome(plain)
    # A request with unusable drafts gets no further drafts.
    assert 4 <= guessed.spec_decode_num_draft_tokens_total <= 4 * MAX_DRAFTS
    assert guessed.invalid_logits_total == 0
