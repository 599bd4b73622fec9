"""Merging the metrics of several gateway processes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.siblings import labelled
from shared.metrics import GatewayMetrics


def counted(tokens: int) -> bytes:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.http_requests.labels('/v1/"odd"\\route', "200").inc(tokens)
    metrics.e2e_latency.labels("model").observe(0.3 * tokens)
    metrics.event_loop_lag.set(0.5)
    return generate_latest(registry)


def test_every_sample_gets_the_gateway_label() -> None:
    texts = {1: counted(5), 0: counted(2)}
    wanted = {}
    for index, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                labels = {**sample.labels, "gateway": str(index)}
                wanted[family.type, sample.name, tuple(sorted(labels.items()))] = sample.value
    found = {}
    merged = labelled(texts).decode()
    for family in text_string_to_metric_families(merged):
        for sample in family.samples:
            found[family.type, sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    assert found == wanted
    assert len(wanted) > 50
    lines = merged.splitlines()
    assert lines.count("# TYPE pelton:http_requests_total counter") == 1


@pytest.mark.parametrize(
    "rubbish", [b"\xff\xfe", b"no such thing {{{\n", b"xxxxxxxxxx", b'# TYPE a counter\na{x="1" 5\n']
)
def test_unreadable_metrics_of_one_process_are_omitted(rubbish: bytes) -> None:
    text = labelled({0: b"# TYPE here gauge\nhere 1.0\n", 1: rubbish})
    assert b'here{gateway="0"} 1.0' in text
    assert b'gateway="1"' not in text
