"""Extended sampling parameters: distributions, seeds, independence of rows, and updated state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.backends.reference import SamplingOps
from tests.unit.worker.sampling.helpers import SmallSampler, logits_like
from worker.plan import ScheduledTokens, StepPlan

# Compiling these takes 8 s of processor time if the cache is empty.
pytestmark = pytest.mark.timeout(300)

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "logit_bias": {7: 50.0}},
    {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "typical_p": 0.7, "top_k": 9},
    {"temperature": 1.2, "top_n_sigma": 1.0},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.01},
    {"temperature": 0.8, "dynatemp_range": 0.5, "top_p": 0.95},
    {"temperature": 1.0, "mirostat": 1, "mirostat_tau": 3.0},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.5, "mirostat_eta": 0.3},
    {"temperature": 1.0, "dry_multiplier": 0.8, "dry_breakers": (3,)},
    {"temperature": 0.0, "dry_multiplier": 2.0, "dry_penalty_last_n": 5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "bad_words": ((7,), (6, 9, 11), (9, 12)), "min_tokens": 3},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(4, 25)), "logit_bias": {5: 2.0}},
    {
        "temperature": 1.1,
        "typical_p": 0.95,
        "xtc_probability": 0.4,
        "dry_multiplier": 0.5,
        "bad_words": ((1,),),
        "allowed_token_ids": tuple(range(1, 39)),
        "repetition_penalty": 1.2,
        "logprobs": 3,
    },
]
TEXT = [4, 5, 6, 9, 4, 5, 6, 9]  # of 8 tokens


def fill(small, kinds, first_row=0, text=TEXT):
    for number, kind in enumerate(kinds):
        small.add(first_row + number, token_ids=text, num_prompt_tokens=4, eos=[2], seed=number, **kind)


def walk(small, rows, logits, start=8):
    """Return token ids [steps][rows]. Each sampled id is written to its row, as the runner does."""
    found = []
    for step, step_logits in enumerate(logits):
        items = [ScheduledTokens(row, start + step - 1, 1, True) for row in rows]
        sampled = small.rows.stage(StepPlan(step=step, scheduled=items)).sampled
        tokens = small.sampler.sample(step_logits.clone(), sampled)
        small.rows.append(sampled, tokens.token_ids)
        found.append(tokens.token_ids.tolist())
    return found


def test_rows_of_a_mixed_batch_are_independent(ops):
    steps = [logits_like(step, rows=len(KINDS)) for step in range(12)]
    together = SmallSampler(ops=ops)
    fill(together, KINDS)
    found = walk(together, range(len(KINDS)), steps)
    for number, kind in enumerate(KINDS):
        alone = SmallSampler(ops=ops)
        alone.add(17, token_ids=TEXT, num_prompt_tokens=4, eos=[2], seed=number, **kind)
        own = walk(alone, [17], [logits[number : number + 1] for logits in steps])
        assert [ids[0] for ids in own] == [ids[number] for ids in found], kind


def test_sampling_from_tables_gives_the_same_tokens():
    """Sample the same rows with tables and row indices, as on a GPU."""
    steps = [logits_like(step, rows=len(KINDS)) for step in range(8)]
    expected, small = [], None
    for host in (True, False):
        small = SmallSampler(ops=SamplingOps())
        fill(small, KINDS, first_row=3)
        if not host:
            small.rows.sampling._host_words = None
        expected.append(walk(small, range(3, 3 + len(KINDS)), steps))
    assert expected[0] == expected[1]


class NoReads(TorchDispatchMode):
    """Mode that rejects operators that wait for a value of the device on a GPU."""

    WAITING = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
        torch.ops.aten._unique2.default,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.WAITING, func
        if func is torch.ops.aten.index.Tensor:
            assert not any(index is not None and index.dtype is torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host_while_sampling():
    # Log-probabilities have a separate kernel on a GPU.
    kinds = [{name: value for name, value in kind.items() if name != "logprobs"} for kind in KINDS]
    small = SmallSampler(ops=SamplingOps())
    small.rows.sampling._host_words = None
    fill(small, kinds)
    items = [ScheduledTokens(row, len(TEXT) - 1, 1, True) for row in range(len(kinds))]
    sampled = small.rows.stage(StepPlan(step=1, scheduled=items)).sampled
    sampled = replace(sampled, mask=torch.full((len(kinds), 2), -1, dtype=torch.int32))
    logits = logits_like(1, rows=len(kinds))
    expected = small.sampler.sample(logits.clone(), sampled).token_ids
    fill(small, kinds)
    sampled = replace(small.rows.stage(StepPlan(step=1, scheduled=items)).sampled, mask=sampled.mask)
    with NoReads():
        found = small.sampler.sample(logits, sampled).token_ids
    assert torch.equal(found, expected)


def test_a_greedy_row_ignores_what_only_shapes_noise(ops):
    small = SmallSampler(ops=ops)
    rarer = {"typical_p": 0.01, "top_n_sigma": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    small.add(0, temperature=0.0, **rarer)
    small.add(1, temperature=0.0, mirostat=2, dynatemp_range=1.0)
    logits = logits_like(4, rows=2)
    assert small.ids(logits, [0, 1], [3, 3]) == logits.argmax(dim=1).tolist()


def test_a_greedy_row_avoids_repetitions_and_bad_words(ops):
    small = SmallSampler(ops=ops)
    logits = torch.zeros(1, 40)
    logits[0, 6], logits[0, 8], logits[0, 9] = 3.0, 2.5, 2.0
    text = [4, 5, 6, 1, 4, 5]
    small.add(0, token_ids=text, temperature=0.0, dry_multiplier=0.8)
    assert small.ids(logits, [0], [6]) == [8]
    small.add(0, token_ids=text, temperature=0.0, bad_words=((4, 5, 6), (8,)))
    assert small.ids(logits, [0], [6]) == [9]
    small.add(0, token_ids=text, temperature=0.0, bad_words=((5, 4, 6),))
    assert small.ids(logits, [0], [6]) == [6]
    small.add(0, token_ids=text, temperature=0.0)
    assert small.ids(logits, [0], [6]) == [6]


def test_only_allowed_ids_and_ends_are_sampled(ops):
    small = SmallSampler(ops=ops)
    small.add(0, eos=[2], temperature=1.5, allowed_token_ids=(11, 39), seed=1)
    ids = small.ids(torch.zeros(300, 40), [0] * 300, list(range(3, 303)))
    assert set(ids) == {2, 11, 39}
    small.add(0, eos=[2], temperature=1.5, allowed_token_ids=(11, 39), ignore_eos=True, seed=1)
    assert set(small.ids(torch.zeros(300, 40), [0] * 300, list(range(3, 303)))) == {11, 39}


@pytest.mark.parametrize(
    "clash",
    [
        {"allowed_token_ids": (5,), "bad_words": ((5,),), "ignore_eos": True},
        {"allowed_token_ids": (2,), "min_tokens": 5},
        {"allowed_token_ids": (5,), "bad_words": ((5,), (2,)), "temperature": 1.0, "typical_p": 0.5},
    ],
    ids=str,
)
def test_no_permitted_token_and_unusable_logits_have_different_ids(clash, ops):
    small = SmallSampler(ops=ops)
    small.add(0, eos=[2], **{"temperature": 0.0} | clash)
    small.add(1, temperature=0.0)
    logits = torch.zeros(2, 40)
    logits[1, 7] = 1.0
    assert small.ids(logits, [0, 1], [3, 3]) == [-2, 7]
    logits[0, 5] = logits[0, 2] = math.nan
    logits[0, 9] = math.nan
    assert small.ids(logits, [0, 1], [3, 3])[0] < 0


@pytest.mark.parametrize("kind", KINDS[5:11] + KINDS[15:], ids=str)
def test_grammars_combine_with_all_other_parameters(kind, ops):
    small = SmallSampler(ops=ops)
    for row in range(3):
        small.add(row, token_ids=TEXT, seed=5, **kind)
    allowed = np.zeros((1, 64), dtype=bool)
    allowed[0, [3, 8, 21, 35]] = True
    mask = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    logits = logits_like(2).repeat(3, 1)
    items = [ScheduledTokens(row, len(TEXT) - 1, 1, True) for row in range(3)]
    sampled = small.rows.stage(StepPlan(step=1, scheduled=items)).sampled
    rows = torch.tensor([0, -1, 0])
    ids = small.sampler.sample(logits.clone(), replace(sampled, mask=mask, mask_rows=rows)).token_ids.tolist()
    assert ids[0] == ids[2] and ids[0] in (3, 8, 21, 35)
    assert ids[1] == small.ids(logits[1:2], [1], [len(TEXT)])[0] or "mirostat" in kind


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_target_surprise(version, ops):
    small = SmallSampler(vocab_size=3000, max_num_seqs=4, ops=ops)
    small.add(0, temperature=1.0, mirostat=version, mirostat_tau=4.0, mirostat_eta=0.5, seed=3)
    row = -1.1 * torch.arange(1, 3001).float().log().unsqueeze(0)  # Zipf's law, with an entropy of 6.4 bits
    surprise = -torch.log_softmax(row[0].double(), dim=0) / math.log(2)
    seen = [float(surprise[ids[0]]) for ids in walk(small, [0], [row] * 140, start=3)]
    assert abs(np.mean(seen[40:]) - 4.0) < 0.25


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_continues_from_the_reported_state(version, ops):
    kind = {"temperature": 1.0, "mirostat": version, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "seed": 8}
    steps = [logits_like(step) for step in range(10)]
    small = SmallSampler(ops=ops)
    small.add(0, **kind)
    whole = [ids[0] for ids in walk(small, [0], steps, start=3)]
    text, mu = [1, 2, 3], None
    for position, logits in enumerate(steps, start=3):
        # Each token uses a new row, as if the request were preempted after it.
        small.add(position, token_ids=text, num_prompt_tokens=3, mu=mu, **kind)
        tokens = small.sample(logits, [position], [position])
        mu = tokens.mu.tolist()[0]
        text = [*text, tokens.token_ids.tolist()[0]]
    assert text[3:] == whole


def test_rows_with_fewer_bad_words_ignore_old_entries(ops):
    small = SmallSampler(ops=ops)
    small.add(0, temperature=0.0, bad_words=((5,),))
    small.add(1, temperature=0.0, bad_words=((6,), (7, 8), (9, 10, 11)))
    logits = torch.zeros(2, 40)
    logits[:, 5], logits[:, 6], logits[:, 0] = 3.0, 2.0, 1.0
    assert small.ids(logits, [0, 1], [3, 3]) == [6, 5]
    logits[:, 6] = 0.0
    assert small.ids(logits, [0, 1], [3, 3])[0] == 0


def test_nothing_is_compiled_while_serving(compiled_ops):
    """The kernels that numba compiled in advance cover all requests."""
    from kernels.ops.logprobs import cpu as logprobs_cpu
    from kernels.ops.sampling import cpu, cpu_borders, extended_cpu, lists_cpu

    ops = compiled_ops
    for rarer in (ops._logprobs, ops._lists, ops._extended):
        rarer.get(in_background=False)
    compiled = [
        function
        for module in (cpu, cpu_borders, extended_cpu, lists_cpu, logprobs_cpu)
        for function in vars(module).values()
        if hasattr(function, "signatures")
    ]
    before = [len(function.signatures) for function in compiled]
    for max_num_seqs in (1, 20):
        small = SmallSampler(max_num_seqs=max_num_seqs, ops=ops)
        kinds = KINDS if max_num_seqs > 1 else [KINDS[15], {"bad_words": ((1,),)}, KINDS[11]]
        for first in range(0, len(kinds), max_num_seqs):
            rows = range(len(kinds[first : first + max_num_seqs]))
            fill(small, kinds[first : first + max_num_seqs])
            walk(small, rows, [logits_like(1, rows=len(rows))])
    assert [len(function.signatures) for function in compiled] == before


def test_a_new_request_replaces_the_lists_of_its_row(ops):
    small = SmallSampler(ops=ops)
    logits = torch.zeros(1, 40)
    logits[0, 7], logits[0, 9] = 3.0, 2.0
    small.add(0, temperature=0.0, bad_words=((7,), (2, 2, 3, 9)), allowed_token_ids=(7, 9), dry_multiplier=1.0)
    assert small.ids(logits, [0], [3]) == [9]
    small.add(0, temperature=0.0, bad_words=((9,),))
    assert small.ids(logits, [0], [3]) == [7]
    small.add(0, token_ids=[7, 5, 5, 7, 5, 5], temperature=0.0, dry_multiplier=2.0, dry_breakers=(5,))
    assert small.ids(logits, [0], [6]) == [7]
    small.add(0, token_ids=[7, 5, 5, 7, 5, 5], temperature=0.0, dry_multiplier=2.0)
    assert small.ids(logits, [0], [6]) == [9]
