"""The profile run: its plans, what it leaves for graphs, and what is said where a GPU is full."""

import pytest
import torch

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import CpuDevice, OutOfMemory
from worker.executor.executor import ExecutorError
from worker.executor.profile import (
    measure_step,
    pages_must_fit,
    profile_plans,
    steps_must_fit,
    verifying_plan,
    weights_must_fit,
)

MIB = 1 << 20


class Gpu(CpuDevice):
    """Holds `room` bytes; a step takes a MiB a token."""

    def __init__(self, room=1 << 40, captures=True):
        super().__init__()
        self.captures = captures
        self.room = room
        self.kept = self.peak = 0
        self.made = []
        self.plans = []

    def make_execute(self, plan):
        self.made.append(plan)
        return self.execute

    def execute(self, plan):
        self.plans.append(plan)
        self.peak = self.kept + plan.num_tokens * MIB
        if self.peak > self.room:
            raise OutOfMemory("full\nand more")

    def allocated_bytes(self):
        return self.kept

    def peak_bytes(self):
        return self.peak

    def free_bytes(self):
        return 3 << 30

    def total_bytes(self):
        return 80 << 30


def measure(gpu, **settings):
    defaults = {"max_num_batched_tokens": 1024, "max_num_seqs": 8, "speculative_method": "off"}
    return measure_step(
        gpu, WorkerSettings(**(defaults | settings)), max_model_len=512, num_groups=1, make_execute=gpu.make_execute
    )


@pytest.mark.parametrize(
    "tokens,seqs,length,counts",
    [
        (1024, 4, 4096, [256] * 4),
        (1023, 4, 4096, [258, 255, 255, 255]),
        (1024, 4, 101, [100] * 4),
        (16, 64, 4096, [1] * 16),
        (16, 4, 1, [1] * 4),
        (2000, 2, 1101, [1000, 1000]),
    ],
)
def test_plans_fill_a_step_as_far_as_requests_can(tokens, seqs, length, counts):
    settings = WorkerSettings(max_num_batched_tokens=tokens, max_num_seqs=seqs, block_size=16)
    first, second = profile_plans(settings, length, 2, tokens)
    assert [item.count for item in first.scheduled] == [len(row.token_ids) for row in first.new_rows] == counts
    assert all(item.start + item.count <= length and item.sample for item in first.scheduled + second.scheduled)
    assert [item.count for item in second.scheduled] == [1] * len(counts)
    assert len(first.block_tables) == 2 * len(counts)
    for table in first.block_tables:
        assert set(table.pages) == {0}  # the only page of the run
        assert len(table.pages) * 16 >= min(counts[table.row] + 1, length)


def test_what_a_decode_step_takes_is_left_for_graphs():
    gpu = Gpu()
    assert measure(gpu) == 8 * MIB * 1.5 + 64 * MIB
    assert [plan.num_tokens for plan in gpu.plans] == [1024, 8]
    assert [(plan.num_pages, plan.max_model_len) for plan in gpu.made] == [(1, 512)]
    assert measure(Gpu(), decode_graphs=False) == 0
    assert measure(Gpu(captures=False)) == 0


def test_the_step_that_samples_most_is_tried_where_there_are_drafts():
    """Eight rows of logits for each request, where other steps have one."""
    gpu = Gpu()
    measure(gpu, speculative_method="ngram")
    assert [plan.num_tokens for plan in gpu.plans] == [1024, 64, 8]
    assert [len(item.drafts) for item in gpu.plans[1].scheduled] == [7] * 8
    gpu = Gpu()
    measure(gpu, speculative_method="ngram", max_num_batched_tokens=20)
    assert [len(item.drafts) for item in gpu.plans[1].scheduled] == [7, 7, 3]


@pytest.mark.parametrize(("length", "tokens", "drafts"), [(101, 1024, [1] * 4), (1, 16, [0] * 4), (4096, 16, [7, 7])])
def test_drafts_of_the_profile_have_their_places(length, tokens, drafts):
    settings = WorkerSettings(max_num_batched_tokens=tokens, max_num_seqs=4, block_size=16)
    first, _ = profile_plans(settings, length, 1, tokens)
    plan = verifying_plan(settings, first, length, tokens, drawn=True)
    assert [len(item.drafts) for item in plan.scheduled] == drafts
    assert plan.num_tokens <= tokens
    for item, table in zip(plan.scheduled, first.block_tables):
        assert item.start + item.count <= min(length, 16 * len(table.pages))


def test_a_step_that_does_not_fit_is_refused_with_the_largest_that_does():
    gpu = Gpu(room=300 * MIB)
    with pytest.raises(ConfigurationError, match=r"-tokens 1024 .* max-num-batched-tokens 256 would fit"):
        measure(gpu)
    assert [plan.num_tokens for plan in gpu.plans] == [1024, 512, 256, 8]


def test_nothing_is_tried_where_other_ranks_wait_and_nothing_advised_that_does_not_fit():
    gpu = Gpu(room=300 * MIB)
    with pytest.raises(ConfigurationError, match="Lower max-num-batched-tokens or max-num-seqs"):
        measure(gpu, tensor_parallel_size=2)
    assert len(gpu.plans) == 1
    with pytest.raises(ConfigurationError, match="Lower max-num-batched-tokens or max-num-seqs"):
        measure(Gpu(room=MIB))


def test_weights_and_pages_that_do_not_fit_name_what_would():
    with pytest.raises(ConfigurationError, match=r"3\.0 of 80\.0 GiB were free\. tensor-parallel-size 4 would"):
        with weights_must_fit(Gpu(), WorkerSettings(tensor_parallel_size=2)):
            raise torch.OutOfMemoryError("full")
    with pytest.raises(ConfigurationError, match=r"5000 pages .* 4\.88 GiB; 3\.00 .* num-kv-pages 3072 would fit"):
        with pages_must_fit(Gpu(), WorkerSettings(num_kv_pages=5000), 5000, MIB):
            raise torch.OutOfMemoryError("full")
    with pytest.raises(ConfigurationError, match=r"gpu-memory-utilization is 0\.9; 0\.85 leaves more room"):
        with pages_must_fit(Gpu(), WorkerSettings(), 5000, MIB):
            raise torch.OutOfMemoryError("full")


def test_a_gpu_that_fills_up_while_serving_ends_the_worker_with_the_settings_name():
    with pytest.raises(ExecutorError, match=r"gpu-memory-utilization is 0\.8; 0\.76 leaves more room \(full\)"):
        with steps_must_fit(WorkerSettings(gpu_memory_utilization=0.8)):
            raise torch.OutOfMemoryError("full")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match=r"^other$"):
        with weights_must_fit(Gpu(), WorkerSettings()):
            raise RuntimeError("other")
