"""What a step brings when it does not fit into one buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.ops.step_inputs.inputs import StepBuffers, StepLayout
from kernels.ops.step_inputs.reference import ReferenceStepOps
from worker.executor.device import CpuDevice
from worker.executor.step_packer import StepPacker

ROOM = 64
"""Words of changes in a buffer, with what says where they go."""


class CountingDevice(CpuDevice):
    """Late, and counts how often all work is waited for."""

    def __init__(self) -> None:
        super().__init__(late=True)
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        super().synchronize()


class Step:
    """Counts how often it is waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("num_copies", [1, 2, 3, 7])
def test_a_step_takes_as_many_buffers_as_copies_and_waits_only_where_they_are_used_up(num_copies: int) -> None:
    layout = StepLayout(4, 8, token_stride=512, num_groups=1, max_pages=4, page_size=2, max_adjustments=1, max_tail=96)
    device = CountingDevice()
    buffers = StepBuffers(layout, device.torch_device)
    packer = StepPacker(buffers, ReferenceStepOps(buffers), device, words_for_lists=96 - ROOM)
    before = [Step() for _ in range(device.depth + 1)]
    for step in before:
        packer.begin()
        packer.send()
        packer.hold(step)
    words = np.arange(1, num_copies * (ROOM - 8) + 1, dtype=np.int32)
    packer.begin()
    packer.change(7, words)
    packer.send()
    assert [step.waits for step in before] == [int(i < num_copies) for i in range(len(before))]
    assert device.waits == max(0, num_copies - len(before))
    assert torch.equal(buffers.state[7 : 7 + len(words)], torch.from_numpy(words))
    assert not buffers.state[:7].any() and not buffers.state[7 + len(words) :].any()
