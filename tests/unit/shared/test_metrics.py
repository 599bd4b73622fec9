"""Metrics: one registration each, one sample per worker, bounded names."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from shared import metrics
from shared.messages import WorkerStats
from shared.metrics import WORKER_COUNTERS, GatewayMetrics, WorkerCollector, WorkerSnapshot
from worker.stats import Counters

# Names that dashboards for vLLM use, with our prefix.
PROMISED = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_per_pos_total
spec_decode_num_accepted_tokens_total
"""


def all_families():
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    registry.register(WorkerCollector(lambda: ()))
    return list(registry.collect())


def test_promised_names_are_there():
    names = {family.name + ("_total" if family.type == "counter" else "") for family in all_families()}
    assert {f"pelton:{name}" for name in PROMISED.split()} <= names


def test_each_worker_is_shown_once_with_its_labels():
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    stats = WorkerStats(num_running=3, pages_in_use=5, counters={"prompt_tokens_total": 7.0, "made_up_total": 1.0})
    snapshots = [WorkerSnapshot("m", "0", True, 20, stats), WorkerSnapshot("m", "1", False, 0, WorkerStats())]
    registry.register(WorkerCollector(lambda: snapshots))

    def value(name, worker):
        return registry.get_sample_value(name, {"model_name": "m", "worker": worker})

    assert value("pelton:num_requests_running", "0") == 3
    assert value("pelton:kv_cache_usage_perc", "0") == 0.25
    assert value("pelton:kv_cache_usage_perc", "1") == 0
    assert (value("pelton:worker_ready", "0"), value("pelton:worker_ready", "1")) == (1, 0)
    assert value("pelton:prompt_tokens_total", "0") == 7
    assert value("pelton:prompt_tokens_total", "1") == 0
    assert b"made_up" not in generate_latest(registry)
    snapshots.clear()
    assert value("pelton:num_requests_running", "0") is None


def test_accepted_drafts_are_shown_by_position():
    counters = Counters()
    for num_drafts, num_accepted in ((3, 3), (2, 0), (4, 1)):
        counters.count_verification(num_drafts, num_accepted)
    stats = WorkerStats(counters=counters.as_dict(), accepted_per_position=counters.accepted_per_position)
    idle = WorkerStats(counters=Counters().as_dict())
    snapshots = [WorkerSnapshot("m", "0", True, 20, stats), WorkerSnapshot("m", "1", True, 20, idle)]
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: snapshots))

    def value(name, worker="0", **labels):
        return registry.get_sample_value(f"pelton:spec_decode_{name}", {"model_name": "m", "worker": worker, **labels})

    totals = {"num_drafts_total": 3, "num_draft_tokens_total": 9, "num_accepted_tokens_total": 4}
    assert {name: value(name) for name in totals} == totals
    assert {name: value(name, "1") for name in totals} == dict.fromkeys(totals, 0)
    by_position = [value("num_accepted_tokens_per_pos_total", position=str(index)) for index in range(4)]
    assert by_position == [2, 1, 1, None]
    assert value("num_accepted_tokens_per_pos_total", "1", position="0") is None


def test_every_metric_has_documentation():
    assert [family.name for family in all_families() if len(family.documentation) < 10] == []
    assert not any(name.endswith("_total") for name in WORKER_COUNTERS)


def test_the_histogram_of_tokens_is_what_prometheus_client_makes() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets = (0.001, 0.01, 0.5, 2.0)
    token_histogram = metrics.TokenHistogram("h", "doc", buckets, ours)
    histogram = Histogram("h", "doc", ["model_name"], registry=theirs, buckets=buckets)
    for model_name, value, count in (("a", 0.001, 3), ("a", 0.0011, 1), ("b", 5.0, 2), ("a", 1.5, 4), ("b", 0.0, 1)):
        token_histogram.labels(model_name).observe(value, count)
        for _ in range(count):
            histogram.labels(model_name).observe(value)

    def samples(registry):
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): pytest.approx(sample.value)
            for family in registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert samples(ours) == samples(theirs)
    assert len(samples(ours)) == 2 * (len(buckets) + 3)
