"""Draft verification: implementations compared with the reference, and the reference with its specification."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.backends.cpu_speculative import CpuSpeculativeOps
from kernels.backends.gpu_sampling import TritonSpeculativeOps
from kernels.backends.reference import SpeculativeOps
from kernels.backends.select import speculative_ops
from kernels.ops.sampling import reference as sampling
from kernels.ops.sampling import triton_splits
from kernels.ops.sampling.cases import SamplingCase, make_case
from kernels.ops.sampling.inputs import NOT_USABLE, NOTHING_LEFT
from kernels.ops.sampling.philox import philox4x32
from kernels.ops.sampling.triton_splits import Split
from kernels.ops.speculative import reference
from kernels.ops.speculative.cases import CASES, make_rejection, make_verification
from kernels.ops.speculative.reference import DraftInputs
from tests.fakes.pairs import slow

NAN = float("nan")


@pytest.fixture(scope="module")
def cpu():
    ops = CpuSpeculativeOps(2)
    ops.compile()
    return ops


@pytest.fixture(params=["cpu", "triton"])
def ops(request, cpu, device):
    """Return operations that take and return CPU tensors."""
    return cpu if request.param == "cpu" else OnDevice(device)


class OnDevice:
    """GPU operations with scratch memory full of NaN."""

    def __init__(self, device):
        self._device = device
        self._ops = TritonSpeculativeOps(device)
        self._ops._scratch._words = torch.full((2_000_000,), 0x7FC00000, dtype=torch.int32, device=device)

    def verify(self, *tensors):
        return tuple(x.cpu() for x in self._ops.verify(*(x.to(self._device) for x in tensors)))

    def probabilities(self, logits, inputs):
        return self._ops.probabilities(logits.to(self._device), inputs.on(self._device)).cpu()

    def reject(self, logits, inputs, drafts):
        moved = (
            None if x is None else x.to(self._device) for x in (drafts.token_ids, drafts.probabilities, drafts.rows)
        )
        return self._ops.reject(logits.to(self._device), inputs.on(self._device), DraftInputs(*moved)).cpu()


def test_rows_are_kept_up_to_the_first_rejection():
    ids = torch.tensor([5, 6, 7, 5, 9, 7, -1, 6, -2, 4, 3, 3])
    drafts = torch.tensor([5, 6, -1, 5, 6, -1, 5, 6, -1, -1, 3, -1])
    kept, accepted = reference.verify(ids, drafts, torch.tensor([0, 3, 6, 8, 9, 10, 10], dtype=torch.int32))
    assert kept.tolist() == [True] * 3 + [True, True, False] + [True, False] + [True] + [True] + [False] * 2
    assert accepted.tolist() == [2, 1, 0, 0, 0, 0]
    assert accepted.dtype is torch.int32


@pytest.mark.parametrize("counts, extra", [([1], 0), ([5, 1, 3, 0, 9], 4), ([33, 70, 1, 32], 1), ([0, 0], 3), ([], 2)])
def test_verify(counts, extra, ops):
    case = make_verification(counts, extra, seed=1)
    kept, accepted = ops.verify(*case)
    expected = reference.verify(*case)
    assert torch.equal(kept, expected.kept)
    assert torch.equal(accepted, expected.num_accepted)
    assert accepted.dtype is torch.int32


def test_only_kept_tokens_are_counted(device):
    counts = torch.zeros(3, 6, dtype=torch.int32)
    counts[2, 4] = 5
    slots = torch.tensor([2, 2, 2, 0, 0, 2])
    ids = torch.tensor([4, 4, 1, 0, -1, -2])
    kept = torch.tensor([True, True, False, True, True, False])
    result = counts.to(device, copy=True)
    reference.add_kept(result, slots.to(device), ids.to(device), kept.to(device))
    counts[2, 4] += 2
    counts[0, 0] += 1
    assert torch.equal(result.cpu(), counts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rejection(case, ops):
    logits, inputs, drafts = make_rejection(replace(case, num_rows=min(case.num_rows, 11)))
    kept = logits.clone()
    expected = reference.reject(logits, inputs, drafts)
    assert torch.equal(ops.reject(logits, inputs, drafts), expected)
    assert torch.equal(logits, kept)
    assert ((expected >= 0) & (expected < case.vocab_size)).all()


@pytest.mark.parametrize("spread, step", [slow(0.3, 0.0), (1.5, 0.5)])
def test_filter_borders_beyond_the_candidates_are_found(spread, step, monkeypatch, device):
    """Use many splits with few candidates, so that a small vocabulary exercises every path."""
    monkeypatch.setattr(triton_splits, "split", lambda vocab, num_lanes=32: Split(128, 2, 2, 16, 1))
    rows = (*CASES[0].rows[1:], (5.0, 150, 0.999, 0.0), (1.0, 120, 1.0, 0.0))
    case = SamplingCase("", 9, 200, spread, rows, step=step)
    logits, inputs, drafts = make_rejection(case)
    # Only some of the equal tokens at top_k's border pass.
    drafts = replace(drafts, token_ids=torch.where(torch.arange(9) % 5 == 3, torch.arange(9) * 16, drafts.token_ids))
    expected = reference.reject(logits, inputs, drafts)
    ops = OnDevice(device)
    assert torch.equal(ops.reject(logits, inputs, drafts), expected)
    shares = reference.probabilities(logits, inputs).float()
    torch.testing.assert_close(ops.probabilities(logits, inputs), shares, rtol=1e-5, atol=1e-9)


def test_cases_include_acceptance_and_rejection():
    logits, inputs, drafts = make_rejection(CASES[0])
    has_one = drafts.token_ids >= 0
    accepted = reference.reject(logits, inputs, drafts) == drafts.token_ids
    assert 0.2 < accepted[has_one].double().mean() < 0.9
    assert not accepted[~has_one].any()


def test_drafts_without_distributions(ops):
    logits, inputs, drafts = make_rejection(CASES[0], 3)
    alone = DraftInputs(drafts.token_ids)
    expected = reference.reject(logits, inputs, alone)
    assert torch.equal(ops.reject(logits, inputs, alone), expected)
    assert not torch.equal(expected, reference.reject(logits, inputs, drafts))


def test_impossible_drafts_are_one_token_proposals(ops):
    """Treat NaN, zero and infinite draft probabilities as one-token proposals; ignore ids beyond the vocabulary."""
    logits, inputs, drafts = make_rejection(SamplingCase("", 10, 60, 1.0, CASES[0].rows), 1)
    alone = reference.reject(logits, inputs, DraftInputs(drafts.token_ids))
    for value in (NAN, 0.0, float("inf")):
        bad = replace(drafts, probabilities=torch.full_like(drafts.probabilities, value))
        assert torch.equal(ops.reject(logits, inputs, bad), alone)
    beyond = replace(drafts, token_ids=torch.full_like(drafts.token_ids, 60))
    none = DraftInputs(torch.full_like(drafts.token_ids, -1))
    assert torch.equal(ops.reject(logits, inputs, beyond), reference.reject(logits, inputs, none))


def test_equal_distributions_accept(ops, cpu):
    logits, inputs, _ = make_rejection(SamplingCase("", 8, 1009, 3.0, CASES[0].rows))
    inputs = replace(inputs, temperature=inputs.temperature.clamp(min=0.5))
    chances = cpu.probabilities(logits, inputs)
    ids = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    drafts = DraftInputs(ids, chances, torch.arange(len(ids)))
    for seed in range(3):
        again = replace(inputs, key=inputs.key + seed)
        assert torch.equal(ops.reject(logits, again, drafts), ids)


def test_draft_is_accepted_if_no_weight_is_left(ops):
    """Accept the draft if its distribution exceeds the target everywhere; nothing is divided by 0."""
    logits, inputs = make_case(SamplingCase("", 16, 9, 1.0, ((1.0, 0, 1.0, 0.0),)))
    ids = torch.arange(16) % 9
    drafts = DraftInputs(ids, torch.full((1, 9), 1e6), torch.zeros(16, dtype=torch.int64))
    assert torch.equal(ops.reject(logits, inputs, drafts), ids)


def test_unusable_and_greedy_rows(ops):
    logits, inputs, drafts = make_rejection(SamplingCase("", 10, 40, 2.0, CASES[0].rows), 2)
    good = ops.reject(logits, inputs, drafts)
    bad = logits.clone()
    bad[0, 3], bad[1, 39], bad[2], bad[8, 1] = NAN, float("inf"), float("-inf"), NAN
    ids = ops.reject(bad, inputs, drafts)
    assert ids[[0, 1, 2, 8]].tolist() == [NOT_USABLE, NOT_USABLE, NOTHING_LEFT, NOT_USABLE]
    rest = [3, 4, 5, 6, 7, 9]
    assert torch.equal(ids[rest], good[rest])
    greedy = replace(inputs, temperature=torch.zeros(10), any_random=False, any_filter=False)
    assert torch.equal(ops.reject(logits, greedy, drafts), logits.argmax(dim=-1))


@pytest.mark.parametrize("vocab", [9, slow(67)])
def test_ids_stay_inside_the_vocabulary(vocab, ops):
    """CVE-2026-54234: rows of zeros, NaN and infinities, in the target's logits and the drafts' distributions."""
    rows = [0.0, NAN, float("-inf"), float("inf"), -1e38]
    weights = [0.0, NAN, float("inf"), 1.0]
    ids = [-1, 0, vocab]
    num = len(rows) * len(weights) * len(ids)
    _, inputs = make_case(SamplingCase("", num, vocab, 1.0, CASES[0].rows))
    logits = torch.tensor(rows).repeat_interleave(num // len(rows)).unsqueeze(1).repeat(1, vocab)
    drafts = DraftInputs(
        torch.tensor(ids).repeat(num // len(ids)),
        torch.tensor(weights).unsqueeze(1).repeat(1, vocab),
        torch.arange(len(weights)).repeat_interleave(len(ids)).repeat(len(rows)),
    )
    found = ops.reject(logits, inputs, drafts).view(len(rows), -1)
    for value, ids_of_row in zip(rows, found):
        if math.isfinite(value):
            assert bool(((ids_of_row >= 0) & (ids_of_row < vocab)).all())
        else:
            assert set(ids_of_row.tolist()) == {NOTHING_LEFT if value == float("-inf") else NOT_USABLE}


def test_grammar_and_penalty_tables(ops):
    logits, inputs, drafts = make_rejection(SamplingCase("", 16, 70, 1.5, CASES[0].rows), 4)
    words = torch.randint(-(2**31), 2**31, (16, 3), generator=torch.Generator().manual_seed(5)).int()
    mask_rows = torch.where(torch.arange(16) % 3 == 0, -1, torch.arange(16).flip(0))
    masked = replace(inputs, mask=words, mask_rows=mask_rows)
    expected = reference.reject(sampling.allow(logits, masked), inputs, drafts)
    assert torch.equal(ops.reject(logits, masked, drafts), expected)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(6))
    tables = {name: torch.empty_like(getattr(inputs, name)) for name in ("temperature", "top_k", "top_p", "log_min_p")}
    for name, table in tables.items():
        table[order] = getattr(inputs, name)
    key, choice = torch.empty_like(inputs.key), torch.empty_like(inputs.choice)
    key[:, order], choice[order] = inputs.key, inputs.choice
    tabled = replace(masked, **tables, key=key, choice=choice, rows=order)
    assert torch.equal(ops.reject(logits, tabled, drafts), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_probabilities(case, ops):
    logits, inputs = make_case(replace(case, num_rows=5))
    result = ops.probabilities(logits, inputs)
    torch.testing.assert_close(result, reference.probabilities(logits, inputs).float(), rtol=1e-5, atol=1e-9)
    bad = logits.clone()
    bad[0, 0] = bad[3, 0] = NAN
    for implementation in (ops, SpeculativeOps()):
        result = implementation.probabilities(bad, inputs)
        assert result.isnan().all(dim=1).nonzero().flatten().tolist() == [0, 3]


def test_random_numbers_equal_the_documentation():
    """Accept a draft of probability p if the ACCP number is below p; otherwise draw from the REPL stream."""
    key, position, choice = torch.tensor([[42], [0]]), torch.tensor([17]), torch.tensor([1])
    inputs = replace(
        make_case(SamplingCase("", 1, 4, 1.0, ((1.0, 0, 1.0, 0.0),)))[1], key=key, position=position, choice=choice
    )

    def words(stream):
        return philox4x32(torch.tensor([[0, 17, 1, stream]]), torch.tensor([[42, 0]]))[0].tolist()

    number = ((words(0x41434350)[0] >> 8) + 0.5) / 2**24
    times = [-math.log(((word >> 8) + 0.5) / 2**24) for word in words(0x5245504C)]
    others = [0.2, 0.3, 0.1]
    for p in (number - 0.001, number + 0.001):
        rest = [(1 - p) * share / 0.6 for share in others]
        logits = torch.tensor([[p, *rest]]).log()
        expected = 0 if number < p else max((1, 2, 3), key=lambda i: rest[i - 1] / times[i])
        assert reference.reject(logits, inputs, DraftInputs(torch.tensor([0]))).item() == expected


def chi_squared(observed, expected):
    """Return the statistic and its limit for a probability of 10**-5 (Wilson and Hilferty 1931)."""
    used = expected > 0
    assert observed[~used].sum() == 0
    freedom = int(used.sum()) - 1
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3


NUM_SEEDS = 10_000
TARGET = torch.tensor([2.0, 1.5, 1.5, 0.7, 0.0, -0.4, -1.0, -2.0, 1.9, 0.1, -3.0])
PARAMETERS = ((0.7, 0, 0.9, 0.0), (1.3, 0, 0.95, 0.0), (1.3, 0, 1.0, 0.0))


def of_seeds(parameters, position=40, choice=2):
    """Return inputs with one row per seed."""
    _, inputs = make_case(SamplingCase("", NUM_SEEDS, 1, 1.0, (parameters,)))
    key = torch.stack((torch.arange(NUM_SEEDS), torch.zeros(NUM_SEEDS, dtype=torch.int64)))
    same = torch.ones(NUM_SEEDS, dtype=torch.int64)
    return replace(inputs, key=key, position=same * position, choice=same * choice)


def proposals(kind, target):
    """Return the logits that drafts are drawn from."""
    flat = torch.zeros_like(target)
    if kind == "wrong":  # proposes almost only a token that the target never samples
        return torch.where(target == target.min(), 12.0, flat)
    return target if kind == "equal" else flat


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("kind", ["equal", "uniform", "wrong", "one-hot", "NaN", "zeros", "none"])
def test_tokens_have_the_target_distribution(kind, parameters, cpu):
    """Draw drafts with the noise that both models share, as the draft model does."""
    inputs = of_seeds(parameters)
    logits = TARGET.expand(NUM_SEEDS, -1)
    exact = reference.probabilities(TARGET.unsqueeze(0), first_row(inputs))[0] * NUM_SEEDS
    of_draft = proposals(kind, TARGET)
    unfiltered = replace(inputs, top_p=torch.ones(NUM_SEEDS, dtype=torch.float64))
    drawn_as = unfiltered if kind in ("uniform", "wrong") else inputs
    ids = sampling.sample(of_draft.expand(NUM_SEEDS, -1), drawn_as)
    chances = reference.probabilities(of_draft.unsqueeze(0), first_row(drawn_as)).float()
    if kind in ("one-hot", "NaN", "zeros"):
        ids = torch.full_like(ids, 1)  # a look-up proposes the same token for any noise
        chances = torch.full_like(chances, NAN if kind == "NaN" else 0.0)
    rows = torch.full_like(ids, -1 if kind == "one-hot" else 0)
    drafts = DraftInputs(torch.full_like(ids, -1)) if kind == "none" else DraftInputs(ids, chances, rows)
    for ops in (SpeculativeOps(), cpu):
        result = ops.reject(logits, inputs, drafts)
        statistic, limit = chi_squared(torch.bincount(result, minlength=len(TARGET)).double(), exact)
        assert statistic < limit
    accepted = (result == ids).double().mean().item()
    assert {"equal": accepted == 1.0, "wrong": accepted < 0.1}.get(kind, True)


def test_rejection_is_independent_of_the_draft_noise(cpu):
    """Use few tokens with unequal probabilities, which would reveal a stream shared by draft and rejection."""
    inputs = of_seeds((1.0, 0, 1.0, 0.0))
    chances = torch.tensor([0.02, 0.4, 0.58])
    ids = sampling.sample(torch.zeros(NUM_SEEDS, 3), inputs)
    drafts = DraftInputs(ids, torch.full((1, 3), 1 / 3), torch.zeros_like(ids))
    result = cpu.reject(chances.log().expand(NUM_SEEDS, -1), inputs, drafts)
    statistic, limit = chi_squared(torch.bincount(result, minlength=3).double(), chances.double() * NUM_SEEDS)
    assert statistic < limit


def first_row(inputs, times=1):
    """Return the inputs of the first row, repeated."""
    names = ("temperature", "top_k", "top_p", "log_min_p", "position", "choice")
    rows = {name: getattr(inputs, name)[:1].expand(times) for name in names}
    return replace(inputs, key=inputs.key[:, :1].expand(2, times), **rows)


def test_invalid_tensors_are_rejected(device):
    logits, inputs, drafts = make_rejection(SamplingCase("", 5, 40, 1.0, CASES[0].rows))
    ops = TritonSpeculativeOps(device)
    with pytest.raises(ValueError, match="must be float32"):
        ops.reject(logits.double(), inputs, drafts)
    with pytest.raises(ValueError, match="draft distributions must be"):
        ops.reject(logits, inputs, replace(drafts, probabilities=torch.zeros(5, 41)))


def test_each_device_has_its_own_operations(device):
    assert isinstance(speculative_ops(torch.device("cpu"), 1), CpuSpeculativeOps)
    logits, inputs, drafts = make_rejection(CASES[4])
    plain = speculative_ops(torch.device("cpu"), 1)  # before compilation
    assert torch.equal(plain.reject(logits, inputs, drafts), reference.reject(logits, inputs, drafts))
    TritonSpeculativeOps(device, 40).compile()
