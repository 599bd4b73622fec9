"""Rare filters: both implementations compared with an independent model in Python floats."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.backends.cpu_sampling import CpuSamplingOps
from kernels.ops.sampling import extended
from kernels.ops.sampling.inputs import ExtendInputs, Feature
from kernels.ops.sampling.philox import XTC_STREAM, philox4x32
from kernels.ops.step_inputs.inputs import (
    CHOICE,
    DYNATEMP_EXPONENT,
    DYNATEMP_RANGE,
    KEY,
    LOG_MIN_P,
    LOG_XTC_THRESHOLD,
    MIROSTAT,
    MIROSTAT_ETA,
    MIROSTAT_MU,
    MIROSTAT_TAU,
    SAMPLING_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_N_SIGMA,
    TOP_P,
    TYPICAL_P,
    XTC_COIN,
)

FLOATS = {
    TEMPERATURE: "temperature",
    TYPICAL_P: "typical_p",
    TOP_N_SIGMA: "top_n_sigma",
    DYNATEMP_RANGE: "dynatemp_range",
    DYNATEMP_EXPONENT: "dynatemp_exponent",
    MIROSTAT_MU: "mu",
}
PLAIN = {
    "temperature": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "mirostat": 0,
    "mu": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
}
ROWS = [
    {},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "temperature": 2.0},
    {"typical_p": 0.6},
    {"typical_p": 0.2, "temperature": 0.5},
    {"typical_p": 0.9, "top_k": 5, "top_p": 0.7, "min_p": 0.02},
    {"typical_p": 1e-9},
    {"xtc_probability": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.03, "top_k": 6, "typical_p": 0.8},
    {"dynatemp_range": 0.7},
    {"dynatemp_range": 2.0, "dynatemp_exponent": 0.5, "top_p": 0.8},
    {"mirostat": 2, "mu": 3.0},
    {"mirostat": 2, "mu": -4.0},
    {"mirostat": 2, "mu": 1e9},
    {"mirostat": 1, "mu": 3.0},
    {"mirostat": 1, "mu": 6.5, "temperature": 1.7},
    {"mirostat": 1, "mu": -3.0},
    {"mirostat": 1, "mu": 1e9, "top_k": 1},
    {"top_n_sigma": 1.5, "dynatemp_range": 0.3, "min_p": 0.01, "typical_p": 0.95, "top_k": 30, "top_p": 0.9,
     "xtc_probability": 0.7, "xtc_threshold": 0.05},
    {"mirostat": 2, "mu": 5.0, "top_n_sigma": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.04},
]  # fmt: skip


def make(all_params, vocab, *, spread=2.0, step=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = len(all_params)
    logits = torch.randn(size, vocab, generator=generator) * spread
    if step:
        logits = (logits / step).round() * step
    rows = [PLAIN | params for params in all_params]

    words = torch.zeros(size, SAMPLING_WORDS, dtype=torch.int32)
    floats = words.view(torch.float32)

    def column(name, dtype=torch.float32):
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    for word, name in FLOATS.items():
        floats[:, word] = column(name)
    floats[:, LOG_MIN_P], floats[:, LOG_XTC_THRESHOLD] = column("min_p").log(), column("xtc_threshold").log()
    words[:, TOP_K], words[:, MIROSTAT] = column("top_k", torch.int32), column("mirostat", torch.int32)
    words.view(torch.float64)[:, TOP_P // 2] = column("top_p", torch.float64)
    words[:, XTC_COIN] = (column("xtc_probability", torch.float64) * 2**24 - 0.5).ceil().int()
    words[:, KEY : KEY + 2] = torch.randint(-(2**31), 2**31, (size, 2), generator=generator).int()
    words[:, CHOICE] = torch.randint(0, 128, (size,), generator=generator).int()
    position = torch.randint(0, 2**17, (size,), generator=generator)
    inputs = ExtendInputs(rows=torch.arange(size), features=Feature(63), words=words, position=position)
    return logits, inputs


def model(row, params, coin):
    """Return a row's kept tokens as id -> (logit - largest) / temperature, and -log2 of each token's probability."""
    params = PLAIN | params
    left = {i: x for i, x in enumerate(row) if x > -math.inf}
    highest = max(left.values())
    if params["top_n_sigma"]:
        mean = math.fsum(left.values()) / len(left)
        sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in left.values()) / len(left))
        left = {i: x for i, x in left.items() if x >= float(np.float32(highest - params["top_n_sigma"] * sigma))}
    temperature = params["temperature"]
    if params["dynatemp_range"]:
        total = math.fsum(math.exp(x - highest) for x in left.values())
        shares = [math.exp(x - highest) / total for x in left.values()]
        entropy = -math.fsum(p * math.log(p) for p in shares if p)
        low, high = max(temperature - params["dynatemp_range"], 0), temperature + params["dynatemp_range"]
        share = entropy / math.log(len(left)) if len(left) > 1 else 0
        temperature = max(low + (high - low) * share ** params["dynatemp_exponent"], 1e-5)
    left = {i: float((np.float32(x) - np.float32(highest)) / np.float32(temperature)) for i, x in left.items()}
    total = math.fsum(math.exp(s) for s in left.values())
    surprise = {i: (math.log(total) - s) / math.log(2) for i, s in left.items()}
    if params["mirostat"] == 2:
        best = min(left, key=lambda i: (-left[i], i))
        left = {i: s for i, s in left.items() if surprise[i] <= params["mu"] or i == best}
    elif params["mirostat"] == 1:
        left = first(left, estimate_k(left, params["mu"]))
    else:
        if params["min_p"]:
            left = {i: s for i, s in left.items() if s >= math.log(np.float32(params["min_p"]))}
        if params["typical_p"] < 1:
            left = typical(left, float(np.float32(params["typical_p"])))
        if params["top_k"]:
            left = first(left, params["top_k"])
        left = nucleus(left, params["top_p"])
    if coin < params["xtc_probability"]:
        total = math.fsum(math.exp(s) for s in left.values())
        above = [i for i in ordered(left) if math.exp(left[i]) / total >= params["xtc_threshold"]]
        for i in above[:-1]:
            del left[i]
    return left, surprise


def ordered(left):
    return sorted(left, key=lambda i: (-left[i], i))


def first(left, count):
    return {i: left[i] for i in ordered(left)[:count]}


def nucleus(left, top_p):
    total = math.fsum(math.exp(s) for s in left.values())
    kept: dict[int, float] = {}
    before = 0.0
    for i in ordered(left):
        if top_p < 1 and kept and before >= top_p * total:
            break
        kept[i] = left[i]
        before += math.exp(left[i])
    return kept


def typical(left, typical_p):
    total = math.fsum(math.exp(s) for s in left.values())
    mean = float(np.float32(math.fsum(math.exp(s) * s for s in left.values()) / total))
    kept: dict[int, float] = {}
    before = 0.0
    for i in sorted(left, key=lambda i: (float(np.float32(abs(np.float32(left[i]) - np.float32(mean)))), i)):
        if kept and before >= typical_p * total:
            break
        kept[i] = left[i]
        before += math.exp(left[i])
    largest = max(kept.values())
    return {i: float(np.float32(s) - np.float32(largest)) for i, s in kept.items()}


def estimate_k(left, mu):
    """Compute mirostat 1's k (Basu et al. 2021, algorithm 1) from probabilities."""
    total = math.fsum(math.exp(s) for s in left.values())
    shares = [math.exp(left[i]) / total for i in ordered(left)[:100]]
    if len(shares) < 2:
        return 1
    t = [math.log((i + 2) / (i + 1)) for i in range(len(shares) - 1)]
    b = [math.log(p / q) for p, q in pairwise(shares)]
    slope = sum(x * y for x, y in zip(t, b)) / sum(x * x for x in t)
    if slope < 1e-6:
        return len(left)
    excess = slope - 1
    ratio = excess / (1 - len(left) ** -excess)
    log_k = (math.log(ratio) + mu * math.log(2)) / slope
    return len(left) if log_k > math.log(len(left)) else max(int(math.exp(log_k)), 1)


def coins(inputs):
    counter = torch.tensor(
        [[0, p, c, XTC_STREAM] for p, c in zip(inputs.position.tolist(), inputs.integer_column(CHOICE).tolist())]
    )
    words = philox4x32(counter, inputs.key.t())[:, 0]
    return [((word >> 8) + 0.5) / 2**24 for word in words.tolist()]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(("vocab", "step"), [(1, 0.0), (2, 0.0), (7, 0.0), (65, 0.25), (131, 0.0), (1009, 0.0)])
def test_kept_tokens_equal_the_model(name, vocab, step, cpu):
    for seed in range(4):
        logits, inputs = make(ROWS, vocab, step=step, seed=seed)
        rows, flips = logits.tolist(), coins(inputs)
        log_mass = cpu.extend(logits, inputs) if name == "cpu" else extended.extend(logits, inputs)
        for i, params in enumerate(ROWS):
            expected, surprise = model(rows[i], params, flips[i])
            kept = {j: x for j, x in enumerate(logits[i].tolist()) if x > -math.inf}
            assert kept.keys() == expected.keys(), (params, seed)
            for j, value in kept.items():
                assert value == pytest.approx(expected[j], rel=1e-5, abs=1e-5)
                if params.get("mirostat"):
                    bits = (float(log_mass[i]) - value) / math.log(2)
                    assert bits == pytest.approx(surprise[j], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("vocab", "spread"), [(49152, 3.0), (50257, 1.0), (4099, 200.0)])
def test_large_cpu_rows_keep_the_same_tokens_as_the_reference(vocab, spread, cpu):
    logits, inputs = make(ROWS, vocab, spread=spread)
    expected = logits.clone()
    masses = extended.extend(expected, inputs)
    found = cpu.extend(logits, inputs)
    uses = inputs.integer_column(MIROSTAT) > 0
    torch.testing.assert_close(found[uses], masses[uses], rtol=1e-6, atol=1e-6)
    for i in range(len(ROWS)):
        differs = (expected[i] > -math.inf) != (logits[i] > -math.inf)
        # The two sums differ by about 1e-7, so a token at a border may differ.
        assert differs.sum() <= 2, ROWS[i]
        both = (expected[i] > -math.inf) & (logits[i] > -math.inf)
        torch.testing.assert_close(logits[i][both], expected[i][both], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_unusable_rows_do_not_affect_others(name, cpu):
    logits, inputs = make(ROWS, 99)
    good = logits.clone()
    run = cpu.extend if name == "cpu" else extended.extend
    run(good, inputs)
    logits[3, 5] = math.nan
    logits[7] = -math.inf
    logits[13, 98] = math.inf
    logits[16] = math.nan
    run(logits, inputs)
    assert logits[3].isnan().any() and logits[16].isnan().all()
    assert (logits[7] == -math.inf).all()
    assert not logits[13].amax().isfinite()
    others = [i for i in range(len(ROWS)) if i not in (3, 7, 13, 16)]
    assert torch.equal(logits[others], good[others])


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(
    "row",
    [
        [0.0] * 9,
        [-3e38] * 9,
        [3e38, -3e38, 3e38] * 3,
        [-math.inf] * 8 + [4.0],
        [1e30] + [-1e30] * 8,
        [5.0] + [-1e4] * 8,
    ],
)
def test_extreme_rows_keep_a_finite_token(name, row, cpu):
    logits, inputs = make(ROWS, 9)
    logits[:] = torch.tensor(row)
    (cpu.extend if name == "cpu" else extended.extend)(logits, inputs)
    assert not logits.isnan().any()
    assert logits.amax(dim=-1).isfinite().all()
    if name == "cpu":
        expected = torch.tensor(row).repeat(len(ROWS), 1)
        extended.extend(expected, inputs)
        assert torch.equal(logits > -math.inf, expected > -math.inf)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_grammar_is_applied_before_filters(name, cpu):
    run = cpu.extend if name == "cpu" else extended.extend
    logits, inputs = make(ROWS, 77)
    allowed = torch.rand(3, 96, generator=torch.Generator().manual_seed(1)) < 0.3
    words = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32))
    mask_rows = torch.tensor([i % 4 - 1 for i in range(len(ROWS))])
    masked = logits.clone()
    for i, mask_row in enumerate(mask_rows.tolist()):
        if mask_row >= 0:
            masked[i, ~allowed[mask_row, :77]] = -math.inf
            logits[i, ~allowed[mask_row, :77]] = math.nan  # masked, so the value must not matter
    expected_mass = run(masked, inputs)
    found_mass = run(logits, replace(inputs, mask=words, mask_rows=mask_rows))
    assert torch.equal(masked, logits)
    assert torch.equal(expected_mass, found_mass)


def pick(inputs, index):
    return replace(inputs, rows=torch.arange(len(index)), words=inputs.words[index], position=inputs.position[index])


def test_rows_are_independent_of_neighbours_and_position(cpu):
    logits, inputs = make(ROWS, 12289)
    together = logits.clone()
    masses = cpu.extend(together, inputs)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))
    shuffled = logits[order]
    assert torch.equal(cpu.extend(shuffled, pick(inputs, order)), masses[order])
    assert torch.equal(shuffled, together[order])
    for i in range(len(ROWS)):
        alone = logits[i : i + 1].clone()
        cpu.extend(alone, pick(inputs, torch.tensor([i])))
        assert torch.equal(alone[0], together[i])


def test_other_rows_are_unchanged(cpu):
    for run in (cpu.extend, extended.extend):
        logits, inputs = make(ROWS[:4], 40)
        all_rows = torch.cat((logits, torch.full((3, 40), 7.0)))
        run(all_rows, replace(inputs, rows=torch.tensor([6, 1, 3, 0])))
        assert not torch.equal(all_rows[1], logits[1])
        assert torch.equal(all_rows[[2]], logits[[2]])
        assert (all_rows[[4, 5]] == 7.0).all()


def test_many_rows_are_processed_in_parts(monkeypatch):
    logits, inputs = make(ROWS, 40)
    words = torch.full((2, 2), 0x5555AAAA, dtype=torch.int32)
    inputs = replace(inputs, mask=words, mask_rows=torch.tensor([i % 3 - 1 for i in range(len(ROWS))]))
    whole = logits.clone()
    masses = extended.extend(whole, inputs)
    monkeypatch.setattr(extended, "MAX_LOGITS", 3 * 40)
    assert torch.equal(extended.extend(logits, inputs), masses)
    assert torch.equal(logits, whole)


def test_xtc_coin_frequency():
    size = 20_000
    _, inputs = make([{"xtc_probability": 0.3}], 1)
    many = pick(inputs, torch.zeros(size, dtype=torch.int64))
    many = replace(many, position=torch.arange(size))
    share = extended.is_xtc_triggered(many).double().mean().item()
    assert abs(share - 0.3) < 4.5 * math.sqrt(0.3 * 0.7 / size)
    many.words[:, XTC_COIN] = 0
    assert not extended.is_xtc_triggered(many).any()
    many.words[:, XTC_COIN] = 2**24
    assert extended.is_xtc_triggered(many).all()


def test_rare_filters_are_compiled_on_first_use():
    ops = CpuSamplingOps(1)
    ops.compile_usual()
    logits, inputs = make(ROWS, 60)
    expected, found = logits.clone(), logits.clone()
    extended.extend(expected, inputs)
    ops.extend(found, inputs)  # in plain PyTorch
    assert torch.equal(found, expected)
    for thread in threading.enumerate():
        if thread.name == "compile-extended":
            thread.join()
    ops.extend(logits, inputs)
    assert torch.equal(logits > -math.inf, expected > -math.inf)


def test_random_parameters(cpu):
    """Check random combinations on rows with many equal logits."""
    rng = random.Random(5)
    all_params = [
        {
            "temperature": rng.choice([0.3, 1.0, 2.0]),
            "min_p": rng.choice([0.0, 0.05]),
            "top_k": rng.choice([0, 3, 20]),
            "top_p": rng.choice([1.0, 0.9, 0.3]),
            "typical_p": rng.choice([1.0, 0.9, 0.2]),
            "top_n_sigma": rng.choice([0.0, 0.7, 2.0]),
            "dynatemp_range": rng.choice([0.0, 0.4]),
            "mirostat": rng.choice([0, 0, 1, 2]),
            "mu": rng.uniform(0, 8),
            "xtc_probability": rng.choice([0.0, 1.0]),
            "xtc_threshold": rng.choice([0.0, 0.03, 0.3]),
        }
        for _ in range(300)
    ]
    logits, inputs = make(all_params, 203, step=0.5, seed=9)
    expected = logits.clone()
    extended.extend(expected, inputs)
    cpu.extend(logits, inputs)
    same = ((logits > -math.inf) == (expected > -math.inf)).all(dim=1)
    assert same.double().mean() > 0.98  # sums at a border may differ in the last bit
    torch.testing.assert_close(logits[same], expected[same], rtol=1e-5, atol=1e-5)


def test_mirostat_updates_mu(cpu):
    logits, inputs = make(ROWS, 300)
    floats = inputs.words.view(torch.float32)
    floats[:, MIROSTAT_TAU], floats[:, MIROSTAT_ETA] = 3.0, 0.3
    log_mass = extended.extend(logits, inputs)
    token_ids = logits.argmax(dim=-1)
    failed = ROWS.index({"mirostat": 1, "mu": 3.0})
    token_ids[failed] = -1
    # The rows of the logits are in a different order than those of the parameters.
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))
    inputs = replace(inputs, rows=order.argsort())
    mus = extended.update_mirostat_mu(logits[order], inputs, log_mass, token_ids[order])
    assert torch.equal(cpu.update_mirostat_mu(logits[order], inputs, log_mass, token_ids[order]), mus)
    for i, params in enumerate(ROWS):
        expected = params.get("mu", 0.0)
        if "mirostat" in params and i != failed:
            expected -= 0.3 * (float(log_mass[i] - logits[i, token_ids[i]]) / math.log(2) - 3.0)
        assert mus[i].item() == pytest.approx(expected, rel=1e-6)
