"""CPU sampling compared with the reference, and the reference compared with an independent model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.backends.select import sampling_ops
from kernels.ops.sampling import reference
from kernels.ops.sampling.cases import CASES, SamplingCase, make_case
from kernels.ops.sampling.inputs import PenaltyInputs
from kernels.ops.sampling.philox import MAX_NOISE, gumbel_noise


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpu_kernel_samples_the_reference_ids(case, cpu):
    for seed in range(3):
        logits, inputs = make_case(case, seed)
        kept = logits.clone()
        expected = reference.sample(logits, inputs)
        assert torch.equal(cpu.sample(logits, inputs), expected)
        assert torch.equal(logits, kept)
        assert ((expected >= 0) & (expected < case.vocab_size)).all()


def test_ids_agree_over_many_positions(cpu):
    logits, inputs = make_case(SamplingCase("many", 512, 515, 2.0, CASES[0].rows, step=0.125))
    inputs = replace(inputs, position=torch.arange(512))
    assert torch.equal(cpu.sample(logits, inputs), reference.sample(logits, inputs))


def sort_and_sum(row, temperature, top_k, top_p, min_p):
    """Return the ids that pass the filters, by Python's sort and float64 sums."""
    highest = max(row)
    scaled = [float((np.float32(x) - np.float32(highest)) / np.float32(temperature)) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if min_p == 0 or scaled[i] >= np.float32(math.log(min_p))]
    order = order[:top_k] if top_k else order
    if top_p >= 1:
        return set(order)
    total = math.fsum(math.exp(scaled[i]) for i in order)
    kept, before = set(), 0.0
    for i in order:
        if before >= top_p * total:
            break
        kept.add(i)
        before += math.exp(scaled[i])
    return kept


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_filters_equal_sorting(step):
    rows = ((0.7, 5, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 0, 1.0, 0.2), (1.5, 9, 0.6, 0.05), (1.0, 3, 0.01, 0.0))
    logits, inputs = make_case(SamplingCase("", 10, 53, 2.0, rows, step=step))
    highest = logits.amax(dim=-1, keepdim=True)
    filtered = reference.filter_tokens((logits - highest) / inputs.temperature.unsqueeze(1), inputs)
    for i, row in enumerate(logits.tolist()):
        kept = set(torch.nonzero(filtered[i] > float("-inf")).flatten().tolist())
        assert kept == sort_and_sum(row, *rows[i % len(rows)])


def test_filters_break_ties_by_the_lowest_id(cpu):
    logits = torch.zeros(64, 40)
    _, inputs = make_case(SamplingCase("", 64, 40, 1.0, ((1.0, 3, 1.0, 0.0), (1.0, 0, 0.1, 0.0))))
    ids = reference.sample(logits, inputs)
    assert set(ids[::2].tolist()) == {0, 1, 2}
    assert set(ids[1::2].tolist()) == {0, 1, 2, 3}
    assert torch.equal(cpu.sample(logits, inputs), ids)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_unusable_row_fails_alone(name, cpu):
    ops = cpu if name == "cpu" else reference
    logits, inputs = make_case(SamplingCase("", 8, 131, 3.0, CASES[0].rows))
    good = ops.sample(logits, inputs)
    bad = logits.clone()
    bad[0, 5] = float("nan")
    bad[1, 130] = float("inf")
    bad[2] = float("-inf")
    bad[3] = float("nan")
    bad[5, 7] = float("nan")
    ids = ops.sample(bad, inputs)
    assert ids[[0, 1, 2, 3, 5]].tolist() == [-1, -1, -2, -1, -1]
    assert ids[[4, 6, 7]].tolist() == good[[4, 6, 7]].tolist()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_minus_infinity_is_never_sampled(name, cpu):
    ops = cpu if name == "cpu" else reference
    logits, inputs = make_case(SamplingCase("", 64, 257, 1.0, ((2.0, 0, 1.0, 0.0), (2.0, 200, 0.999, 0.0))))
    logits[:, torch.arange(257) % 50 != 3] = float("-inf")
    assert (ops.sample(logits, inputs) % 50 == 3).all()


@pytest.mark.parametrize("row", [torch.zeros(1, 3), torch.full((1, 3), -3e38), torch.tensor([[3e38, -3e38, 3e38]])])
def test_extreme_rows_stay_inside_the_vocabulary(row, cpu):
    _, inputs = make_case(SamplingCase("", 1, 3, 1.0, ((0.00001, 2, 0.5, 0.5),)))
    ids = reference.sample(row, inputs)
    assert 0 <= ids.item() < 3
    assert torch.equal(cpu.sample(row, inputs), ids)


def test_noise_is_standard_gumbel_and_finite():
    seeds = torch.arange(64)
    noise = gumbel_noise(torch.stack((seeds, seeds * 7)), seeds % 5, seeds * 31, 4096).double()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    assert noise.isfinite().all() and noise.max() < MAX_NOISE
    # The noise of the largest word must stay finite.
    largest = -math.log(-math.log(((0xFFFFFFFF >> 8) + 0.5) * 2.0**-24))
    assert 17.3 < largest < MAX_NOISE


def test_rows_are_independent_of_neighbours_and_position(cpu):
    logits, inputs = make_case(CASES[2])
    together = cpu.sample(logits, inputs)
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(1))

    def pick(index):
        fields = ("temperature", "top_k", "top_p", "log_min_p", "position", "choice")
        return replace(inputs, key=inputs.key[:, index], **{name: getattr(inputs, name)[index] for name in fields})

    assert torch.equal(cpu.sample(logits[order], pick(order)), together[order])
    for i in range(len(logits)):
        alone = torch.tensor([i])
        assert torch.equal(cpu.sample(logits[alone], pick(alone)), together[alone])


def test_penalties(cpu):
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5]] * 3)
    inputs = PenaltyInputs(
        rows=torch.tensor([2, 0]),
        slots=torch.tensor([0, 1]),
        output_counts=torch.tensor([[0, 0, 3, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.int32),
        in_prompt=torch.tensor([[True, True, False, False, False], [False] * 5]),
        repetition=torch.tensor([2.0, 1.0]),
        presence=torch.tensor([0.5, 1.0]),
        frequency=torch.tensor([0.25, 0.0]),
    )
    expected = torch.tensor(
        [[1.0, -2.0, 1.0, -1.0, 0.5], [2.0, -2.0, 1.0, -1.0, 0.5], [1.0, -4.0, 0.5 - 0.75 - 0.5, -2.75, 0.5]]
    )
    by_reference, by_cpu = logits.clone(), logits.clone()
    reference.penalize(by_reference, inputs)
    cpu.penalize(by_cpu, inputs)
    assert torch.equal(by_reference, expected)
    assert torch.equal(by_cpu, expected)


def test_plain_torch_serves_before_compilation():
    ops = sampling_ops(torch.device("cpu"), 1)
    logits, inputs = make_case(CASES[3])
    assert torch.equal(ops.sample(logits, inputs), reference.sample(logits, inputs))
