"""Repetition detection compared with an exhaustive search."""

from __future__ import annotations

import random
import time

import pytest

from shared.messages import Finish, FinishReason
from shared.sampling_params import RepetitionDetection
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import generate
from worker.requests.repetition import RepetitionWatch


def repeats(tokens: list[int], rule: RepetitionDetection) -> bool:
    return any(
        len(tokens) >= size * rule.min_count and tokens[-size * rule.min_count :] == tokens[-size:] * rule.min_count
        for size in range(rule.min_pattern_size, rule.max_pattern_size + 1)
    )


@pytest.mark.parametrize("seed", range(30))
def test_detector_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    longest = rng.randrange(1, 9)
    rule = RepetitionDetection(
        max_pattern_size=longest, min_pattern_size=rng.randrange(1, longest + 1), min_count=rng.randrange(2, 5)
    )
    watch = RepetitionWatch(rule)
    tokens: list[int] = []
    found = 0
    for _ in range(150):
        if rng.random() < 0.85 and tokens:
            token = tokens[-rng.choice((1, rng.randrange(1, 9))) :][0]
        else:
            token = rng.randrange(3)
        tokens.append(token)
        expected = repeats(tokens, rule)
        found += expected
        assert watch.append(token) == expected
    if rule.min_pattern_size == 1:
        assert found


def test_tokens_emitted_before_resume_count():
    rule = RepetitionDetection(max_pattern_size=3, min_count=3)
    assert RepetitionWatch(rule, [5, 6, 5, 6, 5]).append(6)


def test_cost_per_token_is_independent_of_pattern_length():
    watch = RepetitionWatch(RepetitionDetection(max_pattern_size=1024, min_count=1024))
    begin = time.perf_counter()
    for _ in range(20_000):
        watch.append(7)
    assert (time.perf_counter() - begin) / 20_000 < 0.0005


@pytest.mark.parametrize(("depth", "min_tokens"), [(1, 0), (2, 30)])
def test_repetition_ends_choice(min_tokens, depth):
    rule = RepetitionDetection(max_pattern_size=1, min_count=2)
    sampling = {"max_tokens": 90, "min_tokens": min_tokens, "ignore_eos": True}
    # The executor's texts are hashes, so the test searches for one in which a token occurs twice in a row.
    harness = Harness(depth=depth, max_model_len=200, num_pages=64)
    plain = [make_submit(f"r{n}", [3 + n, 4], sampling=sampling | {"seed": n}) for n in range(6)]
    texts = [generate(submit.token_ids, submit.sampling, 0, 200) for submit in plain]
    ended = 0
    for submit, text in zip(plain, texts):
        watched = sampling | {"seed": submit.sampling.seed, "repetition_detection": rule}
        harness.run(make_submit(submit.request_id, submit.token_ids, sampling=watched))
        lengths = [n for n in range(min_tokens + 1, len(text) + 1) if repeats(text[:n], rule)]
        length = lengths[0] if lengths else 90
        assert harness.tokens[submit.request_id, 0] == text[:length]
        reason = FinishReason.REPETITION if length < 90 else FinishReason.LENGTH
        assert harness.finishes[submit.request_id, 0] == Finish(reason)
        ended += length < 90
    assert ended
