"""DRY, bad words and allowed ids: both implementations compared with brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from kernels.ops.sampling import extended, reference
from kernels.ops.sampling.inputs import (
    MAX_DRY_EXPONENT,
    MAX_DRY_PENALTY,
    AllowedInputs,
    BadWordsInputs,
    DryInputs,
)
from kernels.ops.step_inputs.inputs import DRY_ALLOWED_LENGTH, DRY_BASE, DRY_LAST_N, DRY_MULTIPLIER, SAMPLING_WORDS

STRIDE = 700


@pytest.fixture(params=["torch", "cpu"])
def ops(request, cpu):
    if request.param == "cpu":
        return cpu

    class Torch:
        penalize_repetitions = staticmethod(extended.penalize_repetitions)
        allow_only = staticmethod(reference.allow_only)
        forbid_words = staticmethod(reference.forbid_words)

    return Torch


def bits(ids, vocab):
    flags = np.zeros(-(-vocab // 32) * 32, dtype=bool)
    flags[list(ids)] = True
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))


def table(texts):
    """Return a table of token ids, with remains of earlier requests after each text."""
    tokens = torch.full((len(texts), STRIDE), 1, dtype=torch.int32)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return tokens


def dry_inputs(texts, all_params, vocab):
    """Return inputs for (multiplier, base, allowed_length, last_n, breakers) of each text."""
    order = list(reversed(range(len(texts))))
    tokens = table([texts[i] for i in order])
    breakers = torch.stack([bits(all_params[i][4], vocab) for i in order])
    windows = [len(text) if params[3] < 0 else min(params[3], len(text)) for text, params in zip(texts, all_params)]
    words = torch.zeros(len(texts), SAMPLING_WORDS, dtype=torch.int32)
    for i, (multiplier, base, allowed_length, last_n, _) in enumerate(all_params):
        words[i, DRY_ALLOWED_LENGTH], words[i, DRY_LAST_N] = allowed_length, last_n
        words.view(torch.float32)[i, [DRY_MULTIPLIER, DRY_BASE]] = torch.tensor([float(multiplier), float(base)])
    return DryInputs(
        rows=torch.arange(len(texts)),
        table_rows=torch.tensor(order),
        token_ids=tokens,
        length=torch.tensor([len(text) for text in texts]),
        words=words,
        breakers=breakers,
        longest=max(windows),
        longest_match=max(params[2] for params in all_params) + MAX_DRY_EXPONENT,
    )


def brute_force(text, multiplier, base, allowed, last_n, breakers):
    """Return token -> penalty by comparing every position with the end."""
    text = text if last_n < 0 else text[max(len(text) - last_n, 0) :]
    longest: dict[int, int] = {}
    for end in range(1, len(text)):
        length = 0
        while end - length > 0 and text[end - 1 - length] == text[-1 - length] and text[-1 - length] not in breakers:
            length += 1
            if length == allowed + MAX_DRY_EXPONENT:
                break
        if text[end] not in breakers:
            longest[text[end]] = max(longest.get(text[end], 0), length)
    return {
        token: min(multiplier * base ** (length - allowed), MAX_DRY_PENALTY)
        for token, length in longest.items()
        if length >= allowed
    }


def check_dry(ops, texts, all_params, vocab):
    logits = torch.randn(len(texts), vocab, generator=torch.Generator().manual_seed(3))
    expected = logits.clone()
    for i, (text, params) in enumerate(zip(texts, all_params)):
        for token, penalty in brute_force(text, *params).items():
            expected[i, token] -= np.float32(penalty)
    ops.penalize_repetitions(logits, dry_inputs(texts, all_params, vocab))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    return logits


@pytest.mark.parametrize("vocab", [2, 3, 33])
def test_dry_equals_brute_force(vocab, ops):
    rng = random.Random(vocab)
    texts = [[rng.randrange(vocab) for _ in range(rng.choice([0, 1, 2, 5, 40, 300]))] for _ in range(30)]
    all_params = [
        (
            rng.choice([0.8, 3.0]),
            rng.choice([1.0, 1.75, 4.0]),
            rng.choice([1, 2, 5]),
            rng.choice([-1, -1, 3, 17, 1000]),
            set(rng.sample(range(vocab), rng.choice([0, 0, 1]))),
        )
        for _ in texts
    ]
    check_dry(ops, texts, all_params, vocab)


def test_many_tokens_are_processed_in_parts(ops, monkeypatch):
    monkeypatch.setattr(extended, "MAX_TOKENS", 90)
    texts = [[1, 2, 3] * (1 + number) for number in range(12)]
    check_dry(ops, texts, [(0.8, 1.75, 1 + number % 3, -1, ()) for number in range(12)], 8)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 100])
def test_long_repetitions_are_penalized_finitely(period, ops):
    texts = [[3 + i % period for i in range(600)]] * 4
    all_params = [(100.0, 10.0, 1, -1, ()), (0.8, 1.75, 2, -1, ()), (1.0, 1.0, 1024, -1, ()), (2.0, 2.0, 50, 200, ())]
    logits = check_dry(ops, texts, all_params, 128)
    assert logits.isfinite().all()
    assert (logits / 1e-5).isfinite().all()


def test_dry_in_a_known_text(ops):
    # "1 2 3 4 | 1 2 3" would continue with 4; 5 also followed 3, but after a match of only two tokens.
    text = [9, 2, 3, 5, 1, 2, 3, 4, 8, 1, 2, 3]
    logits = torch.zeros(1, 16)
    ops.penalize_repetitions(logits, dry_inputs([text], [(1.0, 2.0, 2, -1, ())], 16))
    assert logits[0].tolist() == [-2.0 if i == 4 else -1.0 if i == 5 else 0.0 for i in range(16)]
    logits.zero_()
    ops.penalize_repetitions(logits, dry_inputs([text], [(1.0, 2.0, 2, -1, (2,))], 16))
    assert not logits.any()  # only one token follows the breaker


def test_dry_rows_are_independent(ops):
    rng = random.Random(1)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(2, 90))] for _ in range(9)]
    all_params = [(rng.random(), 1.5, rng.randrange(1, 9), rng.choice([-1, 20]), ()) for _ in texts]
    together = torch.zeros(9, 50)
    ops.penalize_repetitions(together, dry_inputs(texts, all_params, 50))
    for i in range(9):
        alone = torch.zeros(1, 50)
        ops.penalize_repetitions(alone, dry_inputs([texts[i]], [all_params[i]], 50))
        assert torch.equal(alone[0], together[i])


def bad_words_inputs(texts, words_of):
    flat = [[(t, len(word) - j) for word in words for j, t in enumerate(word)] for words in words_of]
    width = max(len(tokens) for tokens in flat)
    padded = torch.tensor([tokens + [(0, 0)] * (width + 3 - len(tokens)) for tokens in flat], dtype=torch.int32)
    return BadWordsInputs(
        rows=torch.arange(len(texts)),
        table_rows=torch.arange(len(texts)),
        words=padded,
        token_ids=table(texts),
        length=torch.tensor([len(text) for text in texts]),
        width=width,
    )


def test_bad_words_equal_brute_force(ops):
    rng = random.Random(2)
    texts = [[rng.randrange(3) for _ in range(rng.choice([0, 1, 2, 9]))] for _ in range(40)]
    words_of = [
        [[rng.randrange(3) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(1, 9))] for _ in texts
    ]
    logits = torch.randn(40, 35, generator=torch.Generator().manual_seed(3))
    logits[5, 1] = math.nan
    expected = logits.clone()
    for i, (text, words) in enumerate(zip(texts, words_of)):
        for word in words:
            before = word[:-1]
            if len(before) <= len(text) and text[len(text) - len(before) :] == before:
                expected[i, word[-1]] = -math.inf
    ops.forbid_words(logits, bad_words_inputs(texts, words_of))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab", [1, 32, 45, 1000])
def test_only_allowed_ids_are_kept(vocab, ops):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    allowed = torch.rand(3, vocab, generator=generator) < 0.4
    kept = logits.clone()
    expected = logits.clone()
    for row, table_row in ((4, 2), (0, 0), (3, 2)):
        expected[row, ~allowed[table_row]] = -math.inf
        logits[row, ~allowed[table_row]] = math.nan  # masked, so the value must not matter
    words = torch.stack([bits(flags.nonzero().flatten().tolist(), vocab) for flags in allowed])
    ops.allow_only(logits, AllowedInputs(torch.tensor([4, 0, 3]), torch.tensor([2, 0, 2]), words))
    assert torch.equal(logits, expected)
    assert torch.equal(logits[[1, 2, 5]], kept[[1, 2, 5]])
