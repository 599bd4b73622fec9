"""Tests of bench_engine: its figures, and each part once on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from scripts import ceiling
from scripts._bench import (
    engine,
    engine_host,
    engine_memory,
    engine_prefix,
    engine_speculation,
    engine_steps,
    measurements,
)
from scripts._bench.engine_loop import LoopError, OpClock, engine_loop, timed_executor
from scripts._bench.engine_memory import SPEC, tiny_files
from scripts._bench.engine_speculation import Load, LoadRun, by_position, figures
from scripts._bench.gpu_check_child import ROOT
from scripts._bench.gpu_check_model import RandomWeights, step_cost
from scripts._bench.measurements import Goal, Roofline
from shared.sampling_params import SamplingParams
from worker.stats import Counters

MACHINE = Roofline("cpu", bandwidth=1e9, operations=1e12, measured=True)


@pytest.fixture
def bench(monkeypatch):
    """Benchmark with small loads; the vocabulary is large enough for all sampling parameters."""
    spec = dataclasses.replace(SPEC, vocab_size=6000)
    files = dataclasses.replace(tiny_files(), spec=spec, weights=RandomWeights(spec))
    arguments = ["--rows", "1", "3", "--prefill", "20", "--context", "40", "--seconds", "0.02", "--dtype", "float32",
                 "--host-counts", "2", "16", "--host-steps", "3", "--prefix-rounds", "1", "--speculation-rounds", "1",
                 "--kv-cache-dtype", "float32", "--speculation-loads", "predict", "chat16"]  # fmt: skip
    monkeypatch.setattr(ceiling, "measure", lambda seconds: MACHINE)
    monkeypatch.setattr(engine, "EMPTY_LOAD", engine_prefix.Load(2, 3, prompt=40, output=4))
    monkeypatch.setattr(engine, "SHARED_LOAD", engine_prefix.Load(2, 4, prompt=160, output=4))
    return engine.Bench(engine.parser().parse_args(arguments), files)


def test_goal_is_a_minimum_or_maximum():
    share, host = Goal(0.7), Goal(0.8, is_minimum=False, form=".1f", unit=" ms")
    assert share.verdict(0.7) == ">= 70% met"
    assert share.verdict(0.69) == ">= 70% missed"
    assert host.verdict(0.8) == "<= 0.8 ms met"
    assert host.verdict(0.81) == "<= 0.8 ms missed"
    assert host.entry(0.9) == {"goal": 0.8, "at_least": False, "met": False}


def test_ceiling_is_limited_by_memory_or_products():
    one = step_cost(SPEC, 1, 1, 0, "int4", head_bytes=1.0625)
    assert ceiling.ceiling_ms(MACHINE, SPEC, 1, 1, 1) == pytest.approx(one.num_bytes / 1e6)
    many = step_cost(SPEC, 1, 200, 0)
    slow = dataclasses.replace(MACHINE, operations=1e6)
    assert ceiling.ceiling_ms(slow, SPEC, 1, 200, 200) == pytest.approx(many.num_operations / 1e3)


def test_ceiling_is_measured(monkeypatch):
    monkeypatch.setattr(ceiling, "_READ_VALUES", 1 << 16)
    monkeypatch.setattr(ceiling, "_PRODUCT_ROWS", 4)
    found = ceiling.measure(0.0)
    assert 1e7 < found.bandwidth < 1e14
    assert 1e6 < found.operations < 1e15


def test_step_figures_are_shares_of_ceiling():
    decode = engine_steps.Line("decode", 1, 190, 14.0, [0.014, 0.016, 0.012])
    figures = decode.figures()
    assert figures["share"] == pytest.approx(1.0)
    assert figures["fastest_ms"] == pytest.approx(12.0)
    assert (figures["goal"], figures["tokens_per_second"]) == (0.9, pytest.approx(1000 / 14))
    assert ">= 90% met" in engine_steps.text(decode)
    prompt = engine_steps.Line("prefill", 2048, 2048, 500.0, [1.0])
    assert prompt.figures()["share"] == pytest.approx(0.5)
    assert "met" not in prompt.figures()


def test_prefix_cache_cost_is_share_of_load_time():
    assert engine_prefix.cost_share([0.03, 0.9, 0.03], [0.02, 0.02, 0.01], [2.0, 1.0, 1.0]) == pytest.approx(0.01)


def test_memory_growth_excludes_warm_up():
    samples = [(1000 * n, 2**20 * (100 if n < 5 else 200) + 2048 * n) for n in range(11)]
    figures = engine_memory.growth(samples)
    assert figures["kb_per_1000_requests"] == pytest.approx(2.0)
    assert figures["warm_mb"] == pytest.approx(200, abs=0.02)
    assert figures["end_mb"] - figures["warm_mb"] == pytest.approx(8 / 1024)


def test_steps_part_compares_with_ceiling(bench, capsys):
    decode, more, prefill = bench.steps(["decode", "prefill"])
    assert [line["rows"] for line in (decode, more, prefill)] == [1, 3, 20]
    for line in (decode, more, prefill):
        assert line["share"] == pytest.approx(line["ceiling_ms"] / line["ms"])
        assert 0 < line["fastest_ms"] <= line["ms"]
    assert decode["goal"] == 0.9
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert [line["kind"] for line in bench.steps(["prefill"])] == ["prefill"]


def test_sampling_part_measures_all_kinds(bench):
    kinds = [entry["kind"] for entry in bench.sampling()]
    assert kinds == ["plain", "every kind", "grammar, few bits"]


def test_host_part_counts_further_requests(bench, capsys):
    found = bench.host()
    assert list(found["ms"]) == [2, 16]
    assert all(value > 0 for value in found["ms"].values())
    assert found["us_per_further_request"] == pytest.approx((found["ms"][16] - found["ms"][2]) / 14 * 1e3)
    assert found["at_16"]["goal"] == 0.8
    assert "at 16: <= 0.8 ms" in capsys.readouterr().out


def test_host_time_excludes_model_time(bench):
    class Slow:
        def hidden_states(self, batch, kv):
            time.sleep(0.2)
            return torch.zeros(len(batch.logits_indices), 1)

        def logits(self, hidden):
            return torch.zeros(len(hidden), 6000)

        def copy_pages(self, copies):
            raise AssertionError("no pages are copied in this test")

    clock, settings = OpClock(), bench._settings(2)
    built = timed_executor(settings, bench._files.spec, Slow(), Slow(), bench._sampling_ops(), clock)
    with engine_loop(settings, bench._files, built) as loop:
        assert engine_host.step_ms(loop, clock, 2, 3, 6000) < 200


def test_prefix_part_measures_cost_and_gain(bench, capsys):
    figures = bench.prefix()
    assert figures["cost"]["hits"] == 0
    assert figures["cost"]["host_ms_with"] > 0
    assert figures["cost"]["evictions"] > 0
    # 144 of 160 tokens are shared, which are whole pages.
    assert figures["gain"]["found"] == pytest.approx(4 * 144 / (5 * 144 + 4 * 16 + 1), abs=0.2)
    assert figures["gain"]["ratio"] > 0
    assert "prefix cache, 90% shared" in capsys.readouterr().out


def test_failed_requests_raise_loop_error(bench):
    clock, settings = OpClock(), bench._settings(2)
    built = timed_executor(settings, bench._files.spec, bench._decoder, bench._kv, bench._sampling_ops(), clock)
    load = engine_prefix.Load(1, 1, prompt=4, output=1000)
    with engine_loop(settings, bench._files, built) as loop:
        with pytest.raises(LoopError, match="ended with error"):
            engine_prefix.run_load(loop, clock, load, [[6000] * 4])
        with pytest.raises(LoopError, match="accepted 0 of 1 requests"):
            loop.submit([6000], SamplingParams())
            engine_host.wait_for(loop, 1, seconds=0.1)


def test_idle_engine_is_not_stepped_before_last_output_arrives(bench, monkeypatch):
    """The engine would sleep for a second in that step, which would count as time of the request."""

    class Late:
        """Socket on which a short poll never finds a message."""

        def __init__(self, inner):
            self._inner = inner
            self.recv, self.send = inner.recv, inner.send

        def poll(self, milliseconds):
            return self._inner.poll(milliseconds) if milliseconds > 500 else 0

    settings = bench._settings(2)
    built = timed_executor(settings, bench._files.spec, bench._decoder, bench._kv, bench._sampling_ops(), OpClock())
    with engine_loop(settings, bench._files, built) as loop:
        monkeypatch.setattr(loop, "_socket", Late(loop._socket))
        loop.submit([1, 2], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3))
        engine_host.wait_for(loop, 1)
        while loop.num_queued:
            assert loop.receive() == []  # does not wait while the engine has work
            loop.step()
        outputs = loop.receive()
        assert sum(len(output.token_ids) for output in outputs) == 3
        assert outputs[-1].finish is not None


def test_memory_part_samples_all_kinds_of_requests():
    command = [sys.executable, "-m", "scripts._bench.engine", "--parts", "memory", "--requests", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ})
    figures = json.loads(done.stdout.splitlines()[-1])["memory"]
    assert figures["requests"] >= 300
    assert {"abort", "deadline_exceeded", "length", "stop"} <= set(figures["ends"])
    assert figures["grammars_compiled"] > 1
    counts = [count for count, _ in figures["samples_kb"]]
    assert counts == sorted(counts)
    assert len(counts) == 21
    assert figures["samples_kb"][-1][1] > 50_000
    assert "memory, " in done.stdout


def test_memory_of_children_is_grouped_by_module():
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    commands = [[sys.executable, "-c", code], [sys.executable, "-m", "json.tool"]]
    children = [subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for c in commands]
    try:
        assert children[0].stdout.readline() == "up\n"
        held = measurements.children_by_module(os.getpid())
        name = next(name for name in held if name.startswith("python"))
        assert held[name] == pytest.approx(measurements.resident_bytes(children[0].pid), rel=0.5)
        assert "json.tool" in held
    finally:
        for child in children:
            child.communicate("{}")
    with pytest.raises(OSError, match=str(children[0].pid)):
        measurements.resident_bytes(children[0].pid)


LOAD = Load("repeat", "1 request", [[1, 2]], Goal(1.6, form=".1f", unit="x"))


def run(seconds, texts, *, steps, drafted=0, accepted=0):
    counts = {
        "engine_steps_total": steps,
        "generation_tokens_total": sum(map(len, texts)),
        "spec_decode_num_draft_tokens_total": drafted,
        "spec_decode_num_accepted_tokens_total": accepted,
    }
    return LoadRun(seconds, texts, counts)


def test_speculation_ratio_pairs_adjacent_runs():
    # Both runs of the second round are slow, which must not change the ratio.
    off = [run(1.0, [[1] * 10], steps=10), run(10.0, [[1] * 10], steps=10), run(1.0, [[1] * 10], steps=10)]
    drafting = [
        run(0.5, [[1] * 10], steps=4, drafted=10, accepted=6),
        run(5.0, [[1] * 10], steps=4, drafted=10, accepted=6),
        run(0.5, [[1] * 9 + [2]], steps=7, drafted=10, accepted=3),
    ]
    entry = figures(LOAD, drafting, off)
    assert entry["ratio"] == pytest.approx(2.0)
    assert entry["tokens_per_second"] == pytest.approx(20.0)
    assert entry["tokens_per_second_off"] == pytest.approx(10.0)
    assert entry["tokens_per_step"] == pytest.approx(2.0)
    assert entry["drafts_per_step"] == pytest.approx(2.0)
    assert entry["acceptance"] == pytest.approx(0.5)
    assert entry["same_texts"] == pytest.approx(2 / 3)
    assert (entry["goal"], entry["met"]) == (1.6, True)
    assert ">= 1.6x met" in engine_speculation.line(entry, LOAD.goal)


def test_speculation_without_drafts_has_no_acceptance_rate():
    off = [run(1.0, [[1]], steps=1)]
    entry = figures(LOAD, off, off)
    assert entry["acceptance"] is None
    assert not entry["met"]
    assert " - " in engine_speculation.line(entry, LOAD.goal)


def test_acceptance_by_position_is_share_of_verifications():
    counters = Counters()
    assert by_position(counters) == "-"
    counters.count_verification(3, 2)
    counters.count_verification(3, 1)
    assert by_position(counters) == "1.00 0.50"


def test_speculation_part_runs_with_and_without_drafts(bench, monkeypatch, capsys):
    monkeypatch.setattr(engine_speculation, "OUTPUT", 6)
    monkeypatch.setattr(engine_speculation, "WARM_UPS", 1)
    entries = bench.speculation()
    assert [entry["load"] for entry in entries] == ["predict", "chat16"]
    for entry in entries:
        assert entry["same_texts"] == 1.0
        assert entry["ratio"] > 0
    assert "acceptance by position" in capsys.readouterr().out
