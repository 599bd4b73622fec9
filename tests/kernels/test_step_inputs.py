"""Step inputs: the CPU code and the kernels compared with the reference."""

from __future__ import annotations

import mmap

import pytest
import torch

from kernels.backends.select import step_ops
from kernels.ops.step_inputs.cases import CASES, Case, fill
from kernels.ops.step_inputs.cpu import CpuStepOps
from kernels.ops.step_inputs.inputs import StepBuffers, StepLayout, StepShape
from kernels.ops.step_inputs.reference import ReferenceStepOps
from kernels.ops.step_inputs.triton import TritonStepOps

POISON = -123456789
OPS = {"cpu": CpuStepOps, "triton": TritonStepOps}


@pytest.fixture(params=OPS)
def ops_class(request, device):
    if request.param == "cpu" and device.type != "cpu":
        pytest.skip("numpy requires CPU memory")
    return OPS[request.param]


def poisoned(layout: StepLayout, device: torch.device) -> StepBuffers:
    buffers = StepBuffers(layout, device)
    buffers.outputs.fill_(POISON)
    return buffers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step_inputs(case: Case, ops_class, device):
    outputs = []
    for implementation in (ReferenceStepOps, ops_class):
        buffers = poisoned(case.layout, device)
        shape = fill(buffers, case)
        state = buffers.state.clone()
        implementation(buffers).step_inputs(shape)
        assert torch.equal(buffers.state, state)
        outputs.append(buffers.outputs)
    assert torch.equal(outputs[0], outputs[1])  # both leave words that belong to no request poisoned


def test_reference_on_a_small_step(device):
    layout = StepLayout(2, 8, token_stride=9, num_groups=1, max_pages=4, page_size=2, max_adjustments=1, max_tail=64)
    buffers = poisoned(layout, device)
    layout.token_ids.of(buffers.state)[1] = torch.arange(50, 59)
    layout.tables.of(buffers.state)[0, 1] = torch.tensor([7, 3, 5, 9], dtype=torch.int32)
    for place, values in ((layout.rows, [1, -1]), (layout.starts, [3, 0]), (layout.cu_seqlens, [0, 2, 3])):
        place.of(buffers.packed)[:] = torch.tensor(values, dtype=torch.int32)
    ReferenceStepOps(buffers).step_inputs(StepShape(num_requests=2, num_tokens=3, longest=2, num_columns=4))
    outputs = buffers.outputs
    assert layout.input_ids.of(outputs)[:3].tolist() == [53, 54, 0]
    assert layout.positions.of(outputs)[:3].tolist() == [3, 4, 0]
    assert layout.slot_mapping.of(outputs)[0, :3].tolist() == [7, 10, -1]
    assert layout.block_tables.of(outputs)[0].tolist() == [[7, 3, 5, 0], [0, 0, 0, 0]]
    assert layout.input_ids.of(outputs)[3:].tolist() == [POISON] * 5


def segments_of(buffers: StepBuffers, changes: list[tuple[int, list[int]]]) -> tuple[int, int, int]:
    """Store changes (target word, words) in the packed words and return the arguments of apply_diffs."""
    at = buffers.layout.tail
    entries = []
    for target, words in changes:
        buffers.packed[at : at + len(words)] = torch.tensor(words, dtype=torch.int32)
        low, high = target & 0xFFFFFFFF, target >> 32
        entries += [low - (1 << 32) if low >= 1 << 31 else low, high, len(words), at]
        at += len(words)
    buffers.packed[at : at + len(entries)] = torch.tensor(entries, dtype=torch.int32)
    return at, len(changes), max(len(words) for _, words in changes)


def test_apply_diffs_changes_only_the_given_words(ops_class, device):
    layout = StepLayout(4, 8, 1500, 1, 8, 16, 2, max_tail=8192)
    changes = [(5, [1]), (1500, list(range(1500))), (3001, [9, 8, 7]), (layout.state_words - 2, [4, 5]), (40, [])]
    states = []
    for implementation in (ReferenceStepOps, ops_class):
        buffers = StepBuffers(layout, device)
        buffers.state.fill_(POISON)
        implementation(buffers).apply_diffs(*segments_of(buffers, changes))
        states.append(buffers.state)
    wanted = torch.full_like(states[0], POISON)
    for target, words in changes:
        wanted[target : target + len(words)] = torch.tensor(words, dtype=torch.int32)
    assert torch.equal(states[0], wanted)
    assert torch.equal(states[1], wanted)


@pytest.mark.parametrize("num_sampled", [1, 5, 130])
def test_append_writes_ids_and_zero_for_a_failed_request(num_sampled, ops_class, device):
    layout = StepLayout(150, 150, 7, 1, 1, 7, 1)
    places = torch.randperm(150 * 7, generator=torch.Generator().manual_seed(num_sampled))[:num_sampled]
    ids = torch.arange(100, 100 + num_sampled)
    ids[num_sampled // 2] = -1
    for implementation in (ReferenceStepOps, ops_class):
        buffers = StepBuffers(layout, device)
        buffers.state.fill_(POISON)
        layout.append_at.of(buffers.packed)[:num_sampled] = places
        implementation(buffers).append(num_sampled, ids.to(device))
        wanted = torch.full((layout.state_words,), POISON, dtype=torch.int32)
        wanted[places] = ids.clamp(min=0).int()
        assert torch.equal(buffers.state.cpu(), wanted)


def test_words_beyond_31_bit_offsets(device):
    """Use a state of 9 GiB, almost all of it untouched, in which row 4 starts after word 2**31."""
    if device.type != "cpu":
        pytest.skip("untouched memory is free only on the CPU")
    layout = StepLayout(5, 4, token_stride=2**29, num_groups=1, max_pages=4, page_size=2**27, max_adjustments=1)
    assert layout.tables.at > 2**31
    buffers = StepBuffers.__new__(StepBuffers)
    buffers.layout = layout
    buffers.state = _untouched(layout.state_words)
    buffers.packed = torch.zeros(layout.packed_words, dtype=torch.int32)
    buffers.outputs = torch.full((layout.output_words,), POISON, dtype=torch.int32)
    ops = TritonStepOps(buffers)
    row = 4 * layout.token_stride
    table = layout.tables.at + 4 * layout.max_pages
    ops.apply_diffs(*segments_of(buffers, [(row + 2**28, [77]), (table, [3, 5, 9])]))
    layout.append_at.of(buffers.packed)[0] = row + 2**28 + 1
    ops.append(1, torch.tensor([78]))
    for place, values in ((layout.rows, [4]), (layout.starts, [2**28]), (layout.cu_seqlens, [0, 2])):
        place.of(buffers.packed)[: len(values)] = torch.tensor(values, dtype=torch.int32)
    ops.step_inputs(StepShape(num_requests=1, num_tokens=2, longest=2, num_columns=3))
    assert layout.input_ids.of(buffers.outputs)[:2].tolist() == [77, 78]
    assert layout.slot_mapping.of(buffers.outputs)[0, :2].tolist() == [9 * 2**27, 9 * 2**27 + 1]
    assert layout.block_tables.of(buffers.outputs)[0, 0, :3].tolist() == [3, 5, 9]


def _untouched(num_words: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_words * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.int32)


def test_step_ops_follow_the_device(device):
    chosen = step_ops(StepBuffers(CASES[0].layout, device))
    assert isinstance(chosen, CpuStepOps if device.type == "cpu" else TritonStepOps)
