"""Masks on their way to a device that reads them as late as it may."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.sampling import inputs
from worker import plan
from worker.executor.device import CpuDevice
from worker.executor.late import Misuse
from worker.executor.mask_uploads import MaskUploads


def mask(number: int, num_words: int = 3) -> bytes:
    return b"".join((number * 7 + word).to_bytes(4, "little") for word in range(num_words))


def words(*numbers: int) -> torch.Tensor:
    return torch.tensor([[number * 7 + word for word in range(3)] for number in numbers], dtype=torch.int32)


def test_masks_arrive_in_order_and_buffers_take_turns():
    device = CpuDevice(late=True)
    uploads = MaskUploads(96, 8, device)
    held = []
    for step in range(12):
        numbers = [step + index for index in range(1 + 5 * step % 8)]
        found = uploads.put([mask(number) for number in numbers])
        assert torch.equal(found, words(*numbers))
        download = device.download([found.clone()])
        held.append(download)
        uploads.hold(download)
    assert torch.equal(held[-1].wait()[0], words(*numbers))


def test_a_buffer_that_nobody_holds_would_be_a_race():
    device = CpuDevice(late=True)
    uploads = MaskUploads(96, 8, device)
    with pytest.raises(Misuse):
        for step in range(8):
            uploads.put([mask(step)])
        device.synchronize()


def test_masks_of_another_vocabulary_and_too_many_are_refused():
    uploads = MaskUploads(96, 2, CpuDevice())
    for masks in ([mask(1, 2)], [mask(1), mask(2, 4)], [mask(1)] * 3):
        with pytest.raises(ValueError, match="each has 12"):
            uploads.put(masks)


def test_an_empty_row_has_one_name():
    assert plan.NOTHING_LEFT == inputs.NOTHING_LEFT
