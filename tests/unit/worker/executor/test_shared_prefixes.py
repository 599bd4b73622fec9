"""Detection of requests that share pages in a decode step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from shared.settings import WorkerSettings
from tests.fakes.tiny_server import tiny_spec
from tests.unit.worker.executor.fake_decoder import make_runner
from tests.unit.worker.executor.test_model_runner import new_row
from worker.executor.memory import KVPlan
from worker.executor.shared_prefixes import MIN_SAVED_BYTES, SharedPrefixes, make_prefixes
from worker.kv.geometry import KVGroupSpec
from worker.parallel import ParallelContext
from worker.plan import BlockTableUpdate, ScheduledTokens, StepPlan

CPU = torch.device("cpu")
PAGE = 128
COMMON = list(range(10, 15))
"""Pages of 640 keys."""


def make(min_saved_keys: int = 1) -> SharedPrefixes:
    return SharedPrefixes(
        max_num_seqs=8,
        max_pages=16,
        page_size=PAGE,
        members_per_tile=4,
        min_saved_keys=min_saved_keys,
        device=CPU,
    )


def decode(rows, start=700) -> list[ScheduledTokens]:
    return [ScheduledTokens(row, start, 1, True) for row in rows]


def filled(prefixes: SharedPrefixes, rows=(0, 2, 3, 5, 7)) -> SharedPrefixes:
    for row in rows:
        prefixes.update(row, 0, [*COMMON, 20 + row])
    return prefixes


def test_requests_that_share_their_first_pages_are_one_group():
    prefixes = filled(make())
    prefixes.update(1, 0, [1, 2, 3, 4, 5, 6])
    work = prefixes.find(decode([0, 1, 2, 3, 5, 7]))
    assert work is not None
    assert work.shared_lens.tolist() == [640, 0, 640, 640, 640, 640]
    assert work.members.tolist() == [[0, 0], [2, 0], [3, 0], [4, 0], [5, 0]]


def test_shared_prefixes_are_cached_until_the_batch_changes():
    prefixes = filled(make())
    work = prefixes.find(decode([0, 2, 3, 5]))
    prefixes.update(2, 6, [99])  # a page appended to a request
    assert prefixes.find(decode([0, 2, 3, 5], start=701)) is work
    assert prefixes.find(decode([0, 2, 3, 5, 7])) is not work
    prefixes.update(3, 0, [1, 2, 3, 4, 5, 6])  # another request uses the row
    fewer = prefixes.find(decode([0, 2, 3, 5, 7]))
    assert fewer is not None and fewer.shared_lens.tolist() == [640, 640, 0, 640, 640]


@pytest.mark.parametrize(("full", "windowed"), [(32, 0), (8, 24)])
def test_only_layers_without_a_window_save_reads(full: int, windowed: int):
    layers = range(full + windowed)
    groups = [KVGroupSpec(layers=tuple(layers[:full])), KVGroupSpec(layers=tuple(layers[full:]), window=512)]
    spec = dataclasses.replace(
        tiny_spec(head_dim=64), num_layers=len(layers), kv_groups=tuple(group for group in groups if group.layers)
    )
    decoder = SimpleNamespace(spec=spec, device=torch.device("cuda"), dtype=torch.bfloat16)
    plan = KVPlan(num_pages=100, max_model_len=1024)
    prefixes = make_prefixes(WorkerSettings(), decoder, plan, ParallelContext())
    assert prefixes.min_saved_keys == MIN_SAVED_BYTES // (full * 2 * 2 * 64 * 2)
    assert make_prefixes(WorkerSettings(deterministic=True), decoder, plan, ParallelContext()) is None


def test_small_savings_are_not_used():
    assert filled(make(min_saved_keys=640 * 3)).find(decode([0, 2, 3, 5])) is not None
    assert filled(make(min_saved_keys=640 * 3 + 1)).find(decode([0, 2, 3, 5])) is None
    assert filled(make()).find(decode([0, 2, 3])) is None
    assert filled(make()).find(decode([0, 2, 3, 5], start=500)) is None


@pytest.mark.parametrize("late", [False, True])
def test_the_model_receives_shared_prefixes_in_decode_steps(late):
    runner, decoder, _, _ = make_runner(late=late, max_model_len=600, num_pages=160)
    found = object()
    asked = []

    class Finder:
        updates: list = []

        def update(self, row, start, pages):
            self.updates.append((row, start, pages))

        def find(self, scheduled):
            asked.append([item.row for item in scheduled])
            return found

    runner._prefixes = Finder()
    prefill = StepPlan(
        step=1,
        scheduled=[ScheduledTokens(0, 0, 3, True), ScheduledTokens(1, 0, 2, True)],
        new_rows=[new_row(0, [1, 2, 3]), new_row(1, [4, 5])],
        block_tables=[BlockTableUpdate(0, 0, 0, [3, 4]), BlockTableUpdate(1, 0, 0, [5])],
    )
    runner.execute(prefill)
    runner.execute(StepPlan(step=2, scheduled=[ScheduledTokens(0, 3, 1, True), ScheduledTokens(1, 2, 1, True)]))
    assert Finder.updates == [(0, 0, [3, 4]), (1, 0, [5])]
    assert asked == [[0, 1]]
    assert [batch.cascade for batch in decoder.batches] == [None, found]
