"""Tests of bench_gateway: measurements and reports."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import pytest

from scripts._bench import gateway_memory
from scripts._bench.gateway import Figures, report
from scripts._bench.gateway_memory import Growth, Sample, measure_growth, measure_stores
from scripts._bench.gateway_processes import cpu_seconds, running


@pytest.mark.parametrize("measure", [measure_growth, measure_stores])
async def test_memory_is_sampled_while_requests_are_sent(monkeypatch, measure) -> None:
    monkeypatch.setattr(gateway_memory, "_NUM_SAMPLES", 2)
    monkeypatch.setattr(gateway_memory, "_EXPIRY_SECONDS", 0.0)
    growth = await measure(80)
    assert set(growth.samples) == ({"requests"} if measure is measure_growth else {"responses", "streams"})
    assert set(growth.flat) == set(growth.samples)
    for samples in growth.samples.values():
        assert [one.requests for one in samples] == [40, 80]
        assert all(10_000 < one.kilobytes < 1_000_000 and 5 < one.open_files < 500 for one in samples)


def test_memory_is_flat_without_growth_after_40_percent() -> None:
    sizes = [50.0, 90.0, 95.0, 100.0, 100.5, 101.0, 101.5, 102.0, 102.5, 102.9]
    responses = [Sample(10 * (index + 1), size, 20) for index, size in enumerate(sizes)]
    growth = Growth({"responses": responses, "streams": [Sample(40, 100.0, 20), Sample(100, 103.5, 20)]})
    growth.judge()
    assert growth.flat == {"responses": True, "streams": False}
    assert "streams: memory at the end / at 40 %: 1.035 (growing)" in growth.report()
    assert json.loads(json.dumps(asdict(growth)))["samples"]["streams"][1]["kilobytes"] == 103.5


def test_table_compares_with_bare_server() -> None:
    figures = Figures(
        cpu_us_per_token={"64 streams": 15.0},
        bare_us_per_write={"64 streams": 10.0},
        cpu_ratio={"64 streams": 1.5},
        idle_kilobytes=22.0,
        idle_streams=5000,
    )
    text = report(figures)
    assert "1.50x" in text and "5000 idle streams: 22.0 KB each" in text
    assert json.loads(json.dumps(asdict(figures)))["cpu_ratio"] == {"64 streams": 1.5}


def test_cpu_seconds_of_a_process() -> None:
    with running("-c", "print(1, flush=True)\nwhile True: pass") as process:
        assert process.stdout is not None
        process.stdout.readline()
        start, begin = time.monotonic(), cpu_seconds(process.pid)
        while cpu_seconds(process.pid) - begin < 0.05:
            assert time.monotonic() - start < 50
        assert cpu_seconds(process.pid) - begin <= time.monotonic() - start + 0.02
