"""Uploads of steps and masks: reuse of the host buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.ops.sampling import inputs
from kernels.ops.step_inputs.inputs import StepBuffers, StepLayout
from kernels.ops.step_inputs.reference import ReferenceStepOps
from tests.fakes.late_device import LateDevice, Misuse
from worker import plan
from worker.executor.device import Device
from worker.executor.step_packer import MaskUploads, StepPacker

ROOM = 64
"""Words for changes in a buffer, including their segment descriptions."""


class CountingDevice(LateDevice):
    """Late device that counts calls of synchronize."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        super().synchronize()


class Step:
    """Step that counts calls of wait."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("num_copies", [1, 2, 3, 7])
def test_a_step_uses_one_buffer_per_copy_and_waits_only_when_all_are_used(num_copies: int) -> None:
    layout = StepLayout(4, 8, token_stride=512, num_groups=1, max_pages=4, page_size=2, max_adjustments=1, max_tail=96)
    device = CountingDevice()
    buffers = StepBuffers(layout, device.torch_device)
    packer = StepPacker(buffers, ReferenceStepOps(buffers), device, words_for_lists=96 - ROOM)
    before = [Step() for _ in range(device.depth + 1)]
    for step in before:
        packer.begin()
        packer.send()
        packer.reserve_until(step)
    words = np.arange(1, num_copies * (ROOM - 8) + 1, dtype=np.int32)
    packer.begin()
    packer.change(7, words)
    packer.send()
    assert [step.waits for step in before] == [int(i < num_copies) for i in range(len(before))]
    assert device.waits == max(0, num_copies - len(before))
    assert torch.equal(buffers.state[7 : 7 + len(words)], torch.from_numpy(words))
    assert not buffers.state[:7].any() and not buffers.state[7 + len(words) :].any()


def mask(number: int, num_words: int = 3) -> bytes:
    return b"".join((number * 7 + word).to_bytes(4, "little") for word in range(num_words))


def words(*numbers: int) -> torch.Tensor:
    return torch.tensor([[number * 7 + word for word in range(3)] for number in numbers], dtype=torch.int32)


def test_masks_arrive_in_order_while_buffers_are_reused():
    device = LateDevice()
    uploads = MaskUploads(96, 8, device)
    held = []
    for step in range(12):
        numbers = [step + index for index in range(1 + 5 * step % 8)]
        found = uploads.put([mask(number) for number in numbers])
        assert torch.equal(found, words(*numbers))
        download = device.download([found.clone()])
        held.append(download)
        uploads.reserve_until(download)
    assert torch.equal(held[-1].wait()[0], words(*numbers))


def test_reusing_a_mask_buffer_without_a_reader_is_detected():
    device = LateDevice()
    uploads = MaskUploads(96, 8, device)
    with pytest.raises(Misuse):
        for step in range(8):
            uploads.put([mask(step)])
        device.synchronize()


def test_masks_of_wrong_size_or_number_are_rejected():
    uploads = MaskUploads(96, 2, Device())
    for masks in ([mask(1, 2)], [mask(1), mask(2, 4)], [mask(1)] * 3):
        with pytest.raises(ValueError, match="masks of 12 bytes are allowed"):
            uploads.put(masks)


def test_plan_and_kernels_use_the_same_id_for_no_permitted_token():
    assert plan.NOTHING_LEFT == inputs.NOTHING_LEFT
