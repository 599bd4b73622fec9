"""The gateway's benchmark: that it sends what it says, and what it makes of what it measured."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from scripts._bench import gateway_stores
from scripts._bench.gateway import Figures, report
from scripts._bench.gateway_growth import Growth, kinds, measure_growth
from scripts._bench.gateway_processes import cpu_seconds, running
from scripts._bench.gateway_stores import Kept, Sample, measure_stores


async def test_requests_of_every_kind_are_answered_and_memory_is_read() -> None:
    growth = await measure_growth(60)
    assert list(growth.kilobytes) == [6, 30, 60]
    assert all(10_000 < size < 1_000_000 for size in growth.kilobytes.values())
    added = growth.kilobytes[60] - growth.kilobytes[6]
    assert abs(growth.kilobytes_per_1000_requests - added / 54 * 1000) < 1e-6


def test_kinds_are_whole_and_streamed_good_and_bad_and_left() -> None:
    bodies = [json.loads(kind.data.partition(b"\r\n\r\n")[2]) for kind in kinds()]
    assert {body.get("stream", False) for body in bodies} == {True, False}
    assert {kind.status for kind in kinds()} == {200, 400}
    assert [kind.leaves for kind in kinds()].count(True) == 1


def test_growth_is_told_over_what_it_was_measured() -> None:
    lines = Growth({10_000: 70_000.0, 100_000: 70_900.0}, 10.0).report().splitlines()
    assert lines[0] == "after 10,000 requests: 70,000 KB"
    assert lines[-1] == "from 10,000 to 100,000: 10.00 KB per 1,000 requests"


def test_the_table_shows_costs_beside_the_bare_server() -> None:
    figures = Figures(
        cpu_us_per_token={"64 streams, 1 process": 15.0},
        bare_us_per_write={"64 streams": 10.0},
        cpu_ratio={"64 streams, 1 process": 1.5},
        two_processes_ratio={"64 streams": 1.04},
        two_bare_ratio={"64 streams": 1.02},
        idle_kilobytes=22.0,
        idle_streams=5000,
    )
    text = report(figures)
    assert "1.50x" in text and "5000 idle streams: 22.0 KB each" in text
    assert "1.04x with 64 streams (bare servers 1.02x)" in text
    assert json.loads(json.dumps(asdict(figures)))["cpu_ratio"] == {"64 streams, 1 process": 1.5}


def test_processor_time_of_a_process_is_what_it_used() -> None:
    busy = "import sys\nprint(1, flush=True)\nwhile True: pass"
    with running("-c", busy) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start, begin = time.monotonic(), cpu_seconds(process.pid)
        while cpu_seconds(process.pid) - begin < 0.05:
            assert time.monotonic() - start < 50
        assert cpu_seconds(process.pid) - begin <= time.monotonic() - start + 0.02, "each is told in hundredths"


async def test_responses_and_streams_are_kept_and_left_as_said(monkeypatch) -> None:
    monkeypatch.setattr(gateway_stores, "_SHARES", (0.5, 1.0))
    monkeypatch.setattr(gateway_stores, "_SETTLE_SECONDS", 0.0)
    kept = await measure_stores(80)
    for samples in (kept.responses, kept.streams):
        assert [one.requests for one in samples] == [40, 80]
        assert all(10_000 < one.kilobytes < 1_000_000 and 5 < one.open_files < 500 for one in samples)
    assert set(kept.flat) == {"responses", "streams"}


def test_flat_is_what_does_not_grow_behind_two_fifths() -> None:
    sizes = [50.0, 90.0, 95.0, 100.0, 100.5, 101.0, 101.5, 102.0, 102.5, 102.9]
    kept = Kept([Sample(10 * (index + 1), size, 20) for index, size in enumerate(sizes)], [Sample(40, 100.0, 20)])
    kept.streams.append(Sample(100, 103.5, 20))
    kept.judge()
    assert kept.flat == {"responses": True, "streams": False}
    assert "streams: at the end 1.035 of what it was at 40 %: it grows" in kept.report()
