"""The profile run: its plans, the memory reserved for graphs, and the errors if a step does not fit."""

import pytest

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import Device, OutOfMemory
from worker.executor.profile import measure_step, profile_plans, verifying_plan

MIB = 1 << 20


class Gpu(Device):
    """Device of `room` bytes on which a step uses a MiB per token."""

    def __init__(self, room=1 << 40, captures=True):
        super().__init__()
        self.captures = captures
        self.room = room
        self.allocated = self.peak = 0
        self.kv_plans = []
        self.plans = []

    def make_execute(self, plan):
        self.kv_plans.append(plan)
        return self.execute

    def execute(self, plan):
        self.plans.append(plan)
        self.peak = self.allocated + plan.num_tokens * MIB
        if self.peak > self.room:
            raise OutOfMemory("full\nand more")

    def allocated_bytes(self):
        return self.allocated

    def peak_bytes(self):
        return self.peak


def measure(gpu, **settings):
    defaults = {"max_num_batched_tokens": 1024, "max_num_seqs": 8, "speculative_method": "off"}
    return measure_step(
        gpu, WorkerSettings(**(defaults | settings)), max_model_len=512, num_groups=1, make_execute=gpu.make_execute
    )


@pytest.mark.parametrize(
    "tokens,seqs,length,counts",
    [
        (1024, 4, 4096, [256] * 4),
        (1023, 4, 4096, [256, 256, 256, 255]),
        (1024, 4, 101, [100] * 4),
        (16, 64, 4096, [1] * 16),
        (16, 4, 1, [1] * 4),
        (2000, 2, 1101, [1000, 1000]),
    ],
)
def test_plans_fill_a_step_up_to_the_context_length(tokens, seqs, length, counts):
    settings = WorkerSettings(max_num_batched_tokens=tokens, max_num_seqs=seqs, block_size=16)
    first, second = profile_plans(settings, length, 2, tokens)
    assert [item.count for item in first.scheduled] == [len(row.token_ids) for row in first.new_rows] == counts
    assert all(item.start + item.count <= length and item.sample for item in first.scheduled + second.scheduled)
    assert [item.count for item in second.scheduled] == [1] * len(counts)
    assert len(first.block_tables) == 2 * len(counts)
    for table in first.block_tables:
        assert set(table.pages) == {0}  # the only page of the profile run
        assert len(table.pages) * 16 >= min(counts[table.row] + 1, length)


def test_the_memory_of_a_decode_step_is_reserved_for_graphs():
    gpu = Gpu()
    assert measure(gpu) == 8 * MIB * 1.5 + 64 * MIB
    assert [plan.num_tokens for plan in gpu.plans] == [1024, 8]
    assert [(plan.num_pages, plan.max_model_len) for plan in gpu.kv_plans] == [(1, 512)]
    assert measure(Gpu(), decode_graphs=False) == 0
    assert measure(Gpu(captures=False)) == 0


def test_speculation_profiles_the_step_that_samples_the_most_tokens():
    """Check a step that computes eight rows of logits per request; other steps compute one."""
    gpu = Gpu()
    measure(gpu, speculative_method="ngram")
    assert [plan.num_tokens for plan in gpu.plans] == [1024, 64, 8]
    assert [len(item.drafts) for item in gpu.plans[1].scheduled] == [7] * 8
    gpu = Gpu()
    measure(gpu, speculative_method="ngram", max_num_batched_tokens=20)
    assert [len(item.drafts) for item in gpu.plans[1].scheduled] == [7, 7, 3]


@pytest.mark.parametrize(("length", "tokens", "drafts"), [(101, 1024, [1] * 4), (1, 16, [0] * 4), (4096, 16, [7, 7])])
def test_profiled_drafts_stay_within_the_block_table(length, tokens, drafts):
    settings = WorkerSettings(max_num_batched_tokens=tokens, max_num_seqs=4, block_size=16)
    first, _ = profile_plans(settings, length, 1, tokens)
    plan = verifying_plan(settings, first, length, tokens, drawn=True)
    assert [len(item.drafts) for item in plan.scheduled] == drafts
    assert plan.num_tokens <= tokens
    for item, table in zip(plan.scheduled, first.block_tables):
        assert item.start + item.count <= min(length, 16 * len(table.pages))


def test_the_error_of_a_step_that_does_not_fit_names_a_size_that_fits():
    gpu = Gpu(room=300 * MIB)
    with pytest.raises(ConfigurationError, match=r"-tokens 1024 .* Set --max-num-batched-tokens to 256 or less"):
        measure(gpu)
    assert [plan.num_tokens for plan in gpu.plans] == [1024, 512, 256, 8]


def test_no_size_is_tried_with_several_ranks_or_suggested_if_none_fits():
    gpu = Gpu(room=300 * MIB)
    with pytest.raises(ConfigurationError, match="Lower --max-num-batched-tokens or --max-num-seqs"):
        measure(gpu, tensor_parallel_size=2)
    assert len(gpu.plans) == 1
    with pytest.raises(ConfigurationError, match="Lower --max-num-batched-tokens or --max-num-seqs"):
        measure(Gpu(room=MIB))
