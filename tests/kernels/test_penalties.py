"""Biases, masks and penalties applied in place, bitwise equal to the reference."""

from dataclasses import replace

import pytest
import torch

from kernels.backends.gpu_sampling import TritonSamplingOps
from kernels.common.tensors import on_device
from kernels.ops.penalties import triton as kernels
from kernels.ops.penalties.cases import penalties
from kernels.ops.sampling import reference
from kernels.ops.sampling.inputs import AdjustInputs
from tests.fakes.pairs import slow


def adjustments(num_rows, width, vocab, dtype, num_tables=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_tables, width, generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.3] = float("-inf")
    return AdjustInputs(
        ids=torch.randint(0, vocab, (num_tables, width), generator=generator).to(dtype),
        values=values,
        until=torch.randint(0, 40, (num_tables, width), generator=generator).to(dtype),
        rows=torch.randperm(num_tables, generator=generator)[:num_rows].to(dtype),
        position=torch.randint(0, 40, (num_rows,), generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.int32, slow(torch.int64)])
@pytest.mark.parametrize("width, vocab", [(1, 1), (3, 50), (16, 7), (64, 5000), (270, 97)])
def test_adjustments(width, vocab, dtype, device):
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
    inputs = adjustments(5, width, vocab, dtype)
    expected = logits.clone()
    reference.adjust(expected, inputs)
    result = logits.to(device, copy=True)
    TritonSamplingOps(device).adjust(result, on_device(inputs, device))
    # Bitwise equal, because entries of a repeated id are added in order.
    assert torch.equal(result.cpu(), expected)
    assert not torch.equal(expected, logits)


def test_adjustments_interleaved_in_one_table(device):
    inputs = adjustments(5, 9, 20, torch.int32)
    table = torch.stack((inputs.ids, inputs.values.view(torch.int32), inputs.until), dim=-1).to(device)
    interleaved = replace(
        on_device(inputs, device),
        ids=table[:, :, 0],
        values=table.view(torch.float32)[:, :, 1],
        until=table[:, :, 2],
    )
    expected, result = torch.zeros(5, 20), torch.zeros(5, 20, device=device)
    reference.adjust(expected, inputs)
    kernels.adjust(result, interleaved)
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("num_tables, width", [(9, 9), (1, 1)])
def test_cpu_adjustments_equal_the_reference(num_tables, width, cpu):
    inputs = adjustments(1, width, 20, torch.int32, num_tables)
    table = torch.stack((inputs.ids, inputs.values.view(torch.int32), inputs.until), dim=-1)
    values = table.view(torch.float32)[:, :, 1]
    position = inputs.until[inputs.rows].amax(dim=1).long() - 1
    interleaved = replace(inputs, ids=table[:, :, 0], values=values, until=table[:, :, 2], position=position)
    expected, result = torch.ones(1, 20), torch.ones(1, 20)
    reference.adjust(expected, interleaved)
    cpu.adjust(result, interleaved)
    assert torch.equal(result, expected)
    assert (result != 1.0).any()


def test_table_entries_apply_below_the_length_limit(device):
    inputs = AdjustInputs(
        ids=torch.tensor([[2, 2, 4, 0]], device=device),
        values=torch.tensor([[1.0, float("-inf"), 0.5, 9.0]], device=device),
        until=torch.tensor([[2**31 - 1, 11, 10, 0]], device=device),
        rows=torch.zeros(3, dtype=torch.int64, device=device),
        position=torch.tensor([9, 10, 11], device=device),
    )
    logits = torch.zeros(3, 5, device=device)
    kernels.adjust(logits, inputs)
    inf = float("inf")
    assert logits.tolist() == [[0, 0, -inf, 0, 0.5], [0, 0, -inf, 0, 0], [0, 0, 1, 0, 0]]


def test_tables_without_entries_and_batches_without_rows(device):
    logits = torch.ones(2, 5, device=device)
    kernels.adjust(logits, on_device(adjustments(2, 0, 5, torch.int32), device))
    kernels.adjust(logits[:0], on_device(adjustments(0, 4, 5, torch.int32), device))
    kernels.penalize(logits, on_device(penalties(0, 5), device))
    assert (logits == 1).all()


@pytest.mark.parametrize("num_rows, vocab", [(1, 1), (3, 2049), (4, 300)])
def test_penalties(num_rows, vocab, device):
    inputs = penalties(num_rows, vocab)
    logits = torch.randn(num_rows + 2, vocab, generator=torch.Generator().manual_seed(3))
    logits[0, 0] = float("-inf")
    expected = logits.clone()
    reference.penalize(expected, inputs)
    padded = torch.full((num_rows + 2, vocab + 3), 7.0, device=device)
    result = padded[:, :vocab]
    result.copy_(logits)
    TritonSamplingOps(device).penalize(result, on_device(inputs, device))
    assert torch.equal(result.cpu(), expected)
    assert (padded[:, vocab:] == 7).all()
    narrow = on_device(replace(inputs, rows=inputs.rows.int(), slots=inputs.slots.int()), device)
    again = logits.to(device, copy=True)
    kernels.penalize(again, narrow)
    assert torch.equal(again.cpu(), expected)


@pytest.mark.parametrize("num_rows, vocab, num_extra", [(1, 1, 1), (3, 2049, 5), (4, 300, 16), (2, 40, 0)])
def test_extra_ids_count_like_table_entries(num_rows, vocab, num_extra, cpu, device):
    inputs = penalties(num_rows, vocab, num_extra=num_extra)
    logits = torch.randn(num_rows + 2, vocab, generator=torch.Generator().manual_seed(3)) * 4
    counts = inputs.output_counts.clone()
    for slot, ids in zip(inputs.slots.tolist(), inputs.extra.tolist()):
        for token_id in ids:
            if token_id >= 0:
                counts[slot, token_id] += 1
    expected = logits.clone()
    reference.penalize(expected, replace(inputs, output_counts=counts, extra=None))
    kept = inputs.output_counts.clone()
    for penalize in (reference.penalize, cpu.penalize):
        result = logits.clone()
        penalize(result, inputs)
        assert torch.equal(result, expected)
    result = logits.to(device, copy=True)
    TritonSamplingOps(device).penalize(result, on_device(inputs, device))
    assert torch.equal(result.cpu(), expected)
    assert torch.equal(inputs.output_counts, kept)


def test_slot_beyond_32_bit_offsets(device):
    """Address slot x vocab beyond 2**31, in tables of which only the slot's pages are touched."""
    inputs = penalties(1, 4096)
    slot = 2**31 // 4096 + 1
    counts = torch.empty((slot + 1) * 4096, dtype=torch.int32, device=device).view(-1, 4096)
    in_prompt = torch.empty((slot + 1) * 4096, dtype=torch.bool, device=device).view(-1, 4096)
    counts[slot] = inputs.output_counts[inputs.slots[0]].to(device)
    in_prompt[slot] = inputs.in_prompt[inputs.slots[0]].to(device)
    logits = torch.randn(int(inputs.rows[0]) + 1, 4096, generator=torch.Generator().manual_seed(3))
    expected = logits.clone()
    reference.penalize(expected, inputs)
    far = on_device(replace(inputs, slots=torch.tensor([slot])), device)
    result = logits.to(device, copy=True)
    kernels.penalize(result, replace(far, output_counts=counts, in_prompt=in_prompt))
    assert torch.equal(result.cpu(), expected)


def test_invalid_tensors_are_rejected(device):
    inputs = penalties(2, 40)
    with pytest.raises(ValueError, match="must be float32"):
        kernels.penalize(torch.zeros(4, 40).double(), inputs)
    with pytest.raises(ValueError, match="same width"):
        kernels.penalize(torch.zeros(4, 41), inputs)
    with pytest.raises(ValueError, match="int32 counts"):
        kernels.penalize(torch.zeros(4, 40), replace(inputs, output_counts=inputs.output_counts.long()))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.penalize(torch.zeros(4, 40), replace(inputs, slots=torch.zeros(4, dtype=torch.int64)[::2]))
    adjusted = adjustments(2, 4, 40, torch.int32)
    with pytest.raises(ValueError, match="one shape and stride"):
        kernels.adjust(torch.zeros(2, 40), replace(adjusted, values=adjusted.values[:, :2]))
