"""When the tails of decode steps are captured and which steps get one, with a late device in place of a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from worker.executor.decode_graphs import Size
from worker.executor.device import CaptureError, CpuDevice, OutOfMemory
from worker.executor.tail_graphs import Tail, TailGraphs
from worker.sampling.sampled_rows import Needs, SampledRows

SIZE = Size(4, 1)
NONE = np.zeros(4, dtype=np.int64)
GREEDY = SampledRows(NONE, torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), NONE, Needs(0))


class Recorder:
    """The device and what is computed on it; `error` is raised by the captures that come."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.cleared = 0
        self.computed: list[Tail] = []
        device = CpuDevice(late=True)
        capture = device.capture

        def guarded(run):
            if self.error is not None:
                raise self.error
            return capture(run)

        device.capture = guarded  # type: ignore[method-assign]
        self.tails = TailGraphs(device, self.compute, self.clear)

    def clear(self) -> None:
        self.cleared += 1

    def compute(self, tail: Tail) -> torch.Tensor:
        self.computed.append(tail)
        return torch.full((tail.size.num_requests,), len(self.computed))


def test_a_tail_is_captured_when_asked_for_twice_and_then_given():
    recorder = Recorder()
    tails = recorder.tails
    assert tails.choose(SIZE, GREEDY) is None
    assert not tails.capture_next()
    assert tails.choose(SIZE, GREEDY) is None
    assert tails.capture_next() and recorder.cleared == 1
    assert not tails.capture_next()
    assert tails.num_captured == 1
    graph = tails.choose(SIZE, GREEDY)
    assert graph is not None
    before = len(recorder.computed)
    assert graph.replay().tolist() == [before + 1] * 4
    assert set(recorder.computed) == {Tail(SIZE, Needs(0))}


def test_each_size_and_each_kind_of_sampling_has_its_own():
    tails = Recorder().tails
    noisy = replace(GREEDY, needs=Needs.NOISE | Needs.FILTER)
    for size, sampled in ((SIZE, GREEDY), (SIZE, noisy), (Size(8, 1), noisy)):
        for _ in range(2):
            assert tails.choose(size, sampled) is None
    while tails.capture_next():
        pass
    assert tails.num_captured == 3
    graphs = [tails.choose(size, sampled) for size, sampled in ((SIZE, GREEDY), (SIZE, noisy), (Size(8, 1), noisy))]
    assert len({id(graph) for graph in graphs}) == 3


@pytest.mark.parametrize("needs", [need for need in Needs if need not in (Needs.NOISE, Needs.FILTER)])
def test_what_is_asked_for_seldom_stays_eager(needs):
    tails = Recorder().tails
    asks = (replace(GREEDY, needs=needs | Needs.NOISE), replace(GREEDY, mask=torch.zeros((4, 1), dtype=torch.int32)))
    for _ in range(3):
        assert [tails.choose(SIZE, sampled) for sampled in asks] == [None, None]
        assert tails.choose(Size(4, 2), GREEDY) is None
    assert not tails.capture_next()


def test_what_cannot_be_captured_is_tried_once_and_a_full_device_ends_it():
    recorder = Recorder()
    tails = recorder.tails
    for _ in range(2):
        tails.choose(SIZE, GREEDY)
        tails.choose(Size(8, 1), GREEDY)
        tails.choose(Size(16, 1), GREEDY)
    recorder.error = CaptureError("no")
    assert tails.capture_next() and tails.num_captured == 0
    recorder.error = None
    assert tails.capture_next() and tails.num_captured == 1
    recorder.error = OutOfMemory("full")
    assert tails.capture_next()
    assert not tails.capture_next()
    assert tails.num_captured == 1 and tails.choose(SIZE, GREEDY) is None
