"""The runner on a late device: two steps in flight, captured decode steps, and results as late as permitted."""

from __future__ import annotations

import pytest

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
