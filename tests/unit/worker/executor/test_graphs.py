"""Capture and selection of decode and sampler graphs, with a late device instead of a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fakes.late_device import LateDevice
from worker.executor.device import CaptureError, Device, OutOfMemory
from worker.executor.graphs import DecodeGraphs, SamplerGraphs, SamplerKey, graph_sizes
from worker.sampling.sampled_rows import SampledRows, SamplingFeature


class Model:
    """Model that multiplies its inputs by 10. Padding requests have slot -1."""

    def __init__(self, max_num_seqs: int = 16) -> None:
        self.inputs = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.slots = torch.full((max_num_seqs,), -1)
        self.written: list[int] = []
        self.runs: list[int] = []
        self.fail: dict[int, Exception] = {}

    def clear(self) -> None:
        self.inputs.zero_()
        self.slots.fill_(-1)

    def step(self, values: list[int]) -> None:
        self.inputs[: len(values)] = torch.tensor(values)
        self.slots[: len(values)] = torch.arange(len(values))
        self.slots[len(values) :] = -1

    def compute(self, size: int) -> torch.Tensor:
        self.runs.append(size)
        if size in self.fail:
            raise self.fail[size]
        slots = self.slots[:size]
        self.written += slots[slots >= 0].numpy().tolist()
        return self.inputs[:size] * 10


def make(model: Model) -> DecodeGraphs[torch.Tensor]:
    return DecodeGraphs(LateDevice(), model.compute, model.clear, max_num_seqs=16)


def run(graphs: DecodeGraphs[torch.Tensor], model: Model, values: list[int]) -> int | None:
    """Run one decode step and check the result if a graph computed it."""
    size = graphs.choose(len(values))
    model.step(values)
    if size is not None:
        out = graphs.replay(size)
        assert out[: len(values)].tolist() == [value * 10 for value in values]
    return size


def test_sizes_are_dense_for_small_steps_and_end_with_the_maximum():
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64) == [1, 2, 4, *range(8, 65, 8)]
    assert graph_sizes(4096)[-1] == 4096
    assert len(graph_sizes(4096)) < 100


def test_a_size_requested_twice_is_captured_before_the_third_step_without_writing_pages():
    model = Model()
    graphs = make(model)
    assert [run(graphs, model, [i, i + 1, i + 2]) for i in range(2)] == [None, None]
    model.step([1, 2, 3])  # inputs left by an eager step
    assert graphs.choose(3) == 4
    assert model.written == []
    assert [run(graphs, model, [i, i + 1, i + 2]) for i in range(2)] == [4, 4]
    assert graphs.num_captured == 1


def test_each_step_captures_at_most_one_graph_the_most_requested_first():
    model = Model()
    graphs = make(model)
    for count in (1, 1, 5, 5, 5):
        graphs.choose(count)
    # Size 1 had been requested twice when 5 was first requested, so it was captured then; 8 follows at its third step.
    assert graphs.num_captured == 2
    graphs.choose(2)
    graphs.choose(2)
    for _ in range(3):
        graphs.choose(16)
    captured = list(dict.fromkeys(model.runs))
    assert captured == [1, 8, 2, 16]


def test_a_larger_graph_replaces_a_missing_one_unless_it_is_much_larger():
    model = Model()
    graphs = make(model)
    while 16 not in model.runs:
        graphs.choose(16)
    assert run(graphs, model, [4, 4, 4]) == 16
    assert run(graphs, model, [4]) is None


def test_the_idle_loop_captures_all_sizes_in_order_and_then_returns_false():
    model = Model()
    graphs = make(model)
    graphs.choose(9)
    while graphs.capture_next():
        pass
    assert list(dict.fromkeys(model.runs)) == [16, 1, 2, 4, 8]
    assert run(graphs, model, list(range(9))) == 16
    assert run(graphs, model, [3]) == 1


def test_a_failed_capture_is_not_repeated():
    model = Model()
    model.fail[4] = CaptureError("no")
    graphs = make(model)
    assert [run(graphs, model, [1, 2, 3]) for _ in range(5)] == [None] * 5
    assert model.runs == [4]
    while graphs.capture_next():
        pass
    assert graphs.num_captured == 4


def test_exhausted_memory_stops_capturing_and_keeps_existing_graphs():
    model = Model()
    model.fail[4] = OutOfMemory("full")
    graphs = make(model)
    while graphs.capture_next():
        pass
    assert list(dict.fromkeys(model.runs)) == [1, 2, 4]
    assert graphs.num_captured == 2
    assert run(graphs, model, [3, 4]) == 2
    assert run(graphs, model, [3, 4, 5, 6, 7]) is None


@pytest.mark.parametrize(
    ("device", "count"), [(LateDevice, 0), (LateDevice, 17), (Device, 1)], ids=["no rows", "too many", "no graphs"]
)
def test_steps_without_a_graph_run_eagerly(device, count):
    model = Model()
    graphs = DecodeGraphs(device(), model.compute, model.clear, max_num_seqs=16)
    assert [graphs.choose(count) for _ in range(4)] == [None] * 4
    assert graphs.capture_next() == (device is LateDevice)
    assert bool(model.runs) == (device is LateDevice)


SIZE = 4
NO_ROWS = np.zeros(4, dtype=np.int64)
GREEDY = SampledRows(
    NO_ROWS, torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), NO_ROWS, SamplingFeature(0)
)


class Recorder:
    """Recorder of the computed graphs. Captures raise `error` if it is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.cleared = 0
        self.computed: list[SamplerKey] = []
        device = LateDevice()
        capture = device.capture

        def guarded(run):
            if self.error is not None:
                raise self.error
            return capture(run)

        device.capture = guarded  # type: ignore[method-assign]
        self.graphs = SamplerGraphs(device, self.compute, self.clear)

    def clear(self) -> None:
        self.cleared += 1

    def compute(self, key: SamplerKey) -> torch.Tensor:
        self.computed.append(key)
        return torch.full((key.size,), len(self.computed))


def test_a_sampler_graph_is_captured_after_two_requests():
    recorder = Recorder()
    graphs = recorder.graphs
    assert graphs.choose(SIZE, GREEDY) is None
    assert not graphs.capture_next()
    assert graphs.choose(SIZE, GREEDY) is None
    assert graphs.capture_next() and recorder.cleared == 1
    assert not graphs.capture_next()
    assert graphs.num_captured == 1
    graph = graphs.choose(SIZE, GREEDY)
    assert graph is not None
    before = len(recorder.computed)
    assert graph.replay().tolist() == [before + 1] * 4
    assert set(recorder.computed) == {SamplerKey(SIZE, SamplingFeature(0))}


def test_each_size_and_combination_of_features_has_its_own_sampler_graph():
    graphs = Recorder().graphs
    noisy = replace(GREEDY, features=SamplingFeature.NOISE | SamplingFeature.FILTER)
    for size, sampled in ((SIZE, GREEDY), (SIZE, noisy), (8, noisy)):
        for _ in range(2):
            assert graphs.choose(size, sampled) is None
    while graphs.capture_next():
        pass
    assert graphs.num_captured == 3
    chosen = [graphs.choose(size, sampled) for size, sampled in ((SIZE, GREEDY), (SIZE, noisy), (8, noisy))]
    assert len({id(graph) for graph in chosen}) == 3


@pytest.mark.parametrize(
    "feature",
    [feature for feature in SamplingFeature if feature not in (SamplingFeature.NOISE, SamplingFeature.FILTER)],
)
def test_rare_sampling_features_stay_eager(feature):
    graphs = Recorder().graphs
    asks = (
        replace(GREEDY, features=feature | SamplingFeature.NOISE),
        replace(GREEDY, mask=torch.zeros((4, 1), dtype=torch.int32)),
    )
    for _ in range(3):
        assert [graphs.choose(SIZE, sampled) for sampled in asks] == [None, None]
    assert not graphs.capture_next()


def test_sampler_captures_stop_after_a_failure_or_exhausted_memory():
    recorder = Recorder()
    graphs = recorder.graphs
    for _ in range(2):
        graphs.choose(SIZE, GREEDY)
        graphs.choose(8, GREEDY)
        graphs.choose(16, GREEDY)
    recorder.error = CaptureError("no")
    assert graphs.capture_next() and graphs.num_captured == 0
    recorder.error = None
    assert graphs.capture_next() and graphs.num_captured == 1
    recorder.error = OutOfMemory("full")
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert graphs.num_captured == 1 and graphs.choose(SIZE, GREEDY) is None
