"""When decode graphs are captured and which one a step gets, with a late device in place of a GPU."""

from __future__ import annotations

import pytest
import torch

from worker.executor.decode_graphs import DecodeGraphs, Size, graph_sizes
from worker.executor.device import CaptureError, CpuDevice, OutOfMemory


class Model:
    """Adds a table's entries to its inputs; a padding request has slot -1."""

    def __init__(self, max_num_seqs: int = 16) -> None:
        self.inputs = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.slots = torch.full((max_num_seqs,), -1)
        self.written: list[int] = []
        self.runs: list[Size] = []
        self.fail: dict[int, Exception] = {}

    def clear(self) -> None:
        self.inputs.zero_()
        self.slots.fill_(-1)

    def step(self, values: list[int]) -> None:
        self.inputs[: len(values)] = torch.tensor(values)
        self.slots[: len(values)] = torch.arange(len(values))
        self.slots[len(values) :] = -1

    def compute(self, size: Size) -> torch.Tensor:
        self.runs.append(size)
        if size.num_requests in self.fail:
            raise self.fail[size.num_requests]
        count = size.num_requests * size.tokens_each
        slots = self.slots[:count]
        self.written += slots[slots >= 0].numpy().tolist()
        return self.inputs[:count] * 10


def make(model: Model, **settings) -> DecodeGraphs[torch.Tensor]:
    return DecodeGraphs(CpuDevice(late=True), model.compute, model.clear, max_num_seqs=16, **settings)


def run(graphs: DecodeGraphs[torch.Tensor], model: Model, values: list[int]) -> Size | None:
    """One decode step; checks its result where a graph gave it."""
    size = graphs.choose(len(values), 1)
    model.step(values)
    if size is not None:
        out = graphs.replay(size)
        assert out[: len(values)].tolist() == [value * 10 for value in values]
    return size


def test_sizes_are_dense_where_steps_are_short_and_end_with_the_most():
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64) == [1, 2, 4, *range(8, 65, 8)]
    assert graph_sizes(4096)[-1] == 4096
    assert len(graph_sizes(4096)) < 100


def test_a_size_asked_for_twice_is_captured_before_the_third_step():
    model = Model()
    graphs = make(model)
    assert [run(graphs, model, [i, i + 1, i + 2]) for i in range(4)] == [None, None, Size(4, 1), Size(4, 1)]
    assert graphs.num_captured == 1


def test_capturing_writes_no_page():
    model = Model()
    graphs = make(model)
    for i in range(2):
        run(graphs, model, [i, 7])
    assert model.written == []
    model.step([1, 2])  # what an eager step leaves behind
    size = graphs.choose(2, 1)
    assert model.written == [] and size == Size(2, 1)


def test_one_capture_a_step_and_the_likeliest_first():
    model = Model()
    graphs = make(model)
    for count in (1, 1, 5, 5, 5):
        graphs.choose(count, 1)
    # 1 was asked for twice when 5 came first, so it was captured then; 8 has been asked for twice by its third step.
    assert graphs.num_captured == 2
    graphs.choose(2, 1)
    graphs.choose(2, 1)
    for _ in range(3):
        graphs.choose(16, 1)
    captured = list(dict.fromkeys(model.runs))
    assert captured == [Size(1, 1), Size(8, 1), Size(2, 1), Size(16, 1)]


def test_a_larger_graph_stands_in_for_one_that_is_not_there_but_not_a_much_larger_one():
    model = Model()
    graphs = make(model)
    while Size(16, 1) not in model.runs:
        graphs.choose(16, 1)
    assert run(graphs, model, [4, 4, 4]) == Size(16, 1)
    assert run(graphs, model, [4]) is None


def test_an_idle_loop_captures_all_in_order_and_then_says_so():
    model = Model()
    graphs = make(model)
    graphs.choose(9, 1)
    while graphs.capture_next():
        pass
    assert [size.num_requests for size in dict.fromkeys(model.runs)] == [16, 1, 2, 4, 8]
    assert run(graphs, model, list(range(9))) == Size(16, 1)
    assert run(graphs, model, [3]) == Size(1, 1)


def test_drafts_have_graphs_of_their_own():
    model = Model(64)
    graphs = make(model, max_tokens_each=4)
    for _ in range(2):
        assert graphs.choose(3, 4) is None
    assert graphs.choose(3, 4) == Size(4, 4)
    assert graphs.choose(3, 1) is None
    assert graphs.choose(3, 5) is None
    assert graphs.replay(Size(4, 4)).shape == (16,)


@pytest.mark.parametrize("count", [0, 17])
def test_steps_that_no_graph_holds_run_eagerly(count: int):
    graphs = make(Model())
    assert [graphs.choose(count, 1) for _ in range(4)] == [None] * 4


def test_what_cannot_be_captured_is_not_tried_again():
    model = Model()
    model.fail[4] = CaptureError("no")
    graphs = make(model)
    assert [run(graphs, model, [1, 2, 3]) for _ in range(5)] == [None] * 5
    assert model.runs == [Size(4, 1)]
    while graphs.capture_next():
        pass
    assert graphs.num_captured == 4


def test_full_memory_ends_capturing_and_keeps_what_there_is():
    model = Model()
    model.fail[4] = OutOfMemory("full")
    graphs = make(model)
    while graphs.capture_next():
        pass
    assert [size.num_requests for size in dict.fromkeys(model.runs)] == [1, 2, 4]
    assert graphs.num_captured == 2
    assert run(graphs, model, [3, 4]) == Size(2, 1)
    assert run(graphs, model, [3, 4, 5, 6, 7]) is None


def test_a_device_without_graphs_never_captures():
    model = Model()
    graphs = DecodeGraphs(CpuDevice(), model.compute, model.clear, max_num_seqs=16)
    assert [graphs.choose(1, 1) for _ in range(4)] == [None] * 4
    assert not graphs.capture_next() and model.runs == []
