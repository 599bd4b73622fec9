"""The runner on a late device: two steps in flight, captured decode steps, and results as late as permitted."""

from __future__ import annotations

import pytest

from tests.fakes.engine_harness import make_submit
from tests.fakes.tiny_server import TinyServer, submits
from tests.unit.worker.executor.outcomes import (
    all_features,
    all_features_alone,
    outcome,
    outcomes_alone,
    run_staggered,
)


def run_at_once(server):
    for submit in all_features():
        server.add(submit)
    server.drain()
    return outcome(server)


def test_capturing_all_sizes_in_idle_time_changes_no_text(monkeypatch):
    server = TinyServer(monkeypatch, num_pages=120, max_num_seqs=4)
    while server.runner.capture_next():
        pass
    assert server.num_captured == 3
    assert run_at_once(server) == all_features_alone(False)
    assert server.num_captured == 3


def test_a_prompt_larger_than_the_buffer_is_uploaded_in_several_copies(monkeypatch):
    server = TinyServer(monkeypatch, num_pages=120, max_num_seqs=6)
    packer = server.runner._rows._packer
    packer._changes_end = packer._tail + 40  # words: less than most prompts
    assert run_at_once(server) == all_features_alone(False)


PLAIN = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9})


@pytest.mark.parametrize("num_pages", [120, 30], ids=["enough pages", "preemptions"])
@pytest.mark.parametrize("sampling_params", [PLAIN[:1], PLAIN], ids=["greedy", "greedy and random"])
def test_captured_sampling_changes_no_text(sampling_params, num_pages, monkeypatch):
    """The ids of padding rows must not be written to rows in use."""
    requests = submits(12, seed=5, sampling_params=sampling_params)
    server = TinyServer(monkeypatch, num_pages=num_pages, max_num_seqs=6, max_num_batched_tokens=24)

    def capture_all() -> None:
        while server.runner.capture_next():
            pass

    assert run_staggered(server, requests, capture_all) == outcomes_alone(requests)
    assert server.runner._sampler_graphs.num_captured >= 2
    assert (server.scheduler.counters.num_preemptions_total > 0) == (num_pages == 30)


def test_padding_rows_write_no_sampled_ids(monkeypatch):
    server = TinyServer(monkeypatch, num_pages=60, max_num_seqs=6)
    for number in range(3):
        server.add(make_submit(f"r{number}", [3, 4, 5 + number], sampling={"max_tokens": 12, "temperature": 0.0}))
    rows = server.runner._rows
    padded = []
    while server.scheduler.has_requests:
        server.step()
        if server.runner._graphs.num_captured:
            padded.append((rows._append_at[3].item(), rows._sampled_rows[3].item(), rows._new_positions[3].item()))
    assert (rows._unused_position, 0, 0) in padded[-6:]
    tokens = rows._token_ids
    assert rows._unused_position == tokens.shape[1] - 1 == server.scheduler.config.max_model_len
