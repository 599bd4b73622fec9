"""bench_engine: its arithmetic, and each part once on a tiny model."""

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
from scripts._bench import engine, engine_host, engine_memory, engine_prefix, engine_steps, process_memory
from scripts._bench.engine_loop import FreeModel, LoopError, OpClock, engine_loop, timed_executor
from scripts._bench.engine_memory import SPEC, tiny_files
from scripts._bench.goals import Goal, slope
from scripts._bench.gpu_check_child import ROOT
from scripts._bench.gpu_check_model import RandomWeights
from scripts.ceiling import KERNELS, Ceiling, LinearShapes, Matrices, Timing
from shared.sampling_params import SamplingParams

PLAIN, PACKED, INT8, INT4 = KERNELS
SMALL_SHAPES = LinearShapes(
    num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=96, vocab_size=320
)


@pytest.fixture
def bench(monkeypatch):
    """All parts, small; the vocabulary is as large as the sampling parameters that are measured need."""
    spec = dataclasses.replace(SPEC, vocab_size=6000)
    files = dataclasses.replace(tiny_files(), spec=spec, weights=RandomWeights(spec))
    arguments = ["--rows", "1", "3", "--prefill", "20", "--context", "40", "--seconds", "0.02", "--dtype", "float32",
                 "--host-counts", "2", "16", "--host-steps", "3", "--prefix-rounds", "1"]  # fmt: skip
    monkeypatch.setattr(engine, "EMPTY_LOAD", engine_prefix.Load(2, 3, prompt=40, output=4))
    monkeypatch.setattr(engine, "SHARED_LOAD", engine_prefix.Load(2, 4, prompt=160, output=4))
    return engine.Bench(engine.parser().parse_args(arguments), files)


def test_goals_bound_from_below_and_from_above():
    share, host = Goal(0.7), Goal(0.8, least=False, form=".1f", unit=" ms")
    assert share.verdict(0.7) == ">= 70% met"
    assert share.verdict(0.69) == ">= 70% missed"
    assert host.verdict(0.8) == "<= 0.8 ms met"
    assert host.verdict(0.81) == "<= 0.8 ms missed"
    assert host.entry(0.9) == {"goal": 0.8, "at_least": False, "met": False}


def test_the_slope_is_that_of_a_line():
    assert slope([16, 32, 128], [1.0, 1.16, 2.12]) == pytest.approx(0.01)


def test_layers_and_head_have_each_their_best_kernel():
    timings = [
        Timing(PLAIN, 3.0, 0.5),
        Timing(PACKED, 2.0, 0.4),
        Timing(INT8, 4.0, 0.3),
        Timing(INT4, 1.0, float("inf")),
    ]
    found = ceiling.best(timings, 8, 8)
    assert (found.kernel, found.head_kernel) == (INT4, INT8)
    assert found.seconds == pytest.approx(1.3)
    again = found.lowered(1.5, 0.2)
    assert (again.layers_seconds, again.head_seconds) == (1.0, 0.2)
    entry = again.entry()
    assert entry["tokens_per_second"] == pytest.approx(8 / 1.2)
    assert entry["tokens_per_second_without_head"] == pytest.approx(8.0)


def test_kernels_are_timed_where_they_can_be_used():
    timings = ceiling.time_kernels(Matrices(SMALL_SHAPES), rows=65, head_rows=1, seconds=0.0)
    assert [timing.kernel for timing in timings] == list(KERNELS)
    layers = {timing.kernel: timing.layers for timing in timings}
    assert layers[INT8] == layers[INT4] == float("inf")
    assert 0 < layers[PLAIN] < 10
    assert timings[KERNELS.index(INT4)].head == float("inf")
    assert 0 < timings[KERNELS.index(PLAIN)].head < 10


def test_a_kernel_that_the_processor_lacks_is_left_out(monkeypatch, capsys):
    def lacking(weight, rows):
        raise RuntimeError("no such instruction\nmore of it")

    kernels = (PLAIN, dataclasses.replace(PACKED, prepare=lacking))
    monkeypatch.setattr(ceiling, "KERNELS", kernels)
    timings = ceiling.time_kernels(Matrices(SMALL_SHAPES), rows=2, head_rows=2, seconds=0.0)
    assert ceiling.best(timings, 2, 2).kernel is PLAIN
    assert capsys.readouterr().err == "bf16 packed: left out: no such instruction\n"


def test_each_layer_has_matrices_of_its_own():
    """Or all but the first would come from the cache, and the ceiling would be too high."""
    pointers: set[int] = set()

    def remember(weight, rows):
        copy = PLAIN.prepare(weight, rows)
        pointers.update(cell.cell_contents.data_ptr() for cell in copy.__closure__)
        return copy

    Matrices(SMALL_SHAPES).layers(dataclasses.replace(PLAIN, prepare=remember), 1)
    assert len(pointers) == 4 * SMALL_SHAPES.num_layers


def test_shares_of_the_ceiling():
    decode = engine_steps.Line("decode", 16, 190, Ceiling(16, 16, PACKED, INT8, 0.012, 0.002), [0.02, 0.021, 0.016])
    figures = decode.figures()
    assert figures["share"] == pytest.approx(0.7)
    assert figures["fastest_share"] == pytest.approx(0.875)
    assert (figures["goal"], figures["tokens_per_second"]) == (0.7, pytest.approx(800))
    prompt = engine_steps.Line("prefill", 2048, 2048, Ceiling(512, 1, PACKED, INT8, 0.2, 0.001), [1.0])
    assert prompt.ceiling_seconds == pytest.approx(0.801)  # the layers four times, one row of the head
    assert prompt.figures()["met"] is True
    assert ">= 70% met" in engine_steps.text(prompt)
    assert "met" not in engine_steps.Line("decode", 32, 190, decode.ceiling, [1.0]).figures()


def test_what_the_cache_costs_is_the_hosts_more_over_the_whole():
    assert engine_prefix.cost_share([0.03, 0.9, 0.03], [0.02, 0.02, 0.01], [2.0, 1.0, 1.0]) == pytest.approx(0.01)


def test_growth_counts_from_the_end_of_the_warm_up():
    samples = [(1000 * n, 2**20 * (100 if n < 5 else 200) + 2048 * n) for n in range(11)]
    figures = engine_memory.growth(samples)
    assert figures["kb_per_1000_requests"] == pytest.approx(2.0)
    assert figures["warm_mb"] == pytest.approx(200, abs=0.02)
    assert figures["end_mb"] - figures["warm_mb"] == pytest.approx(8 / 1024)


def test_steps_are_compared_with_their_ceiling(bench, capsys):
    decode, more, prefill = bench.steps(["decode", "prefill"])
    assert [line["rows"] for line in (decode, more, prefill)] == [1, 3, 20]
    for line in (decode, more, prefill):
        assert line["share"] == pytest.approx(line["ceiling_ms"] / line["ms"])
        assert 0 < line["fastest_ms"] <= line["ms"]
    assert decode["goal"] == 0.8
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert [line["kind"] for line in bench.steps(["prefill"])] == ["prefill"]


def test_sampling_is_a_share_of_a_step(bench):
    kinds = [entry["kind"] for entry in bench.sampling()]
    assert kinds == ["plain", "every kind", "grammar, few bits"]


def test_the_host_is_measured_beside_both_models(bench, capsys):
    entries = bench.host()
    assert [entry["beside"] for entry in entries] == ["the model", "a model without cost"]
    for entry in entries:
        assert list(entry["ms"]) == [2, 16]
        assert all(value > 0 for value in entry["ms"].values())
        assert entry["us_per_further_request"] == pytest.approx((entry["ms"][16] - entry["ms"][2]) / 14 * 1e3)
        assert entry["at_16"]["goal"] == 0.8
    assert "at 16: <= 0.8 ms" in capsys.readouterr().out


def test_the_models_time_is_taken_out_of_the_hosts(bench):
    """A model that is slow on purpose does not make the host slower."""

    class Slow:
        def hidden_states(self, batch, kv):
            time.sleep(0.2)
            return torch.zeros(len(batch.logits_indices), 1)

        def logits(self, hidden):
            return torch.zeros(len(hidden), 6000)

        def copy_pages(self, copies):
            raise AssertionError("nothing is forked here")

    clock, settings = OpClock(), bench._settings(2)
    built = timed_executor(settings, bench._files.spec, Slow(), Slow(), bench._sampling_ops(), clock)
    with engine_loop(settings, bench._files, built) as loop:
        assert engine_host.step_ms(loop, clock, 2, 3, 6000) < 200


def test_the_prefix_cache_is_measured_with_and_without(bench, capsys):
    figures = bench.prefix()
    assert figures["cost"]["hits"] == 0
    assert figures["cost"]["host_ms_with"] > 0
    assert figures["cost"]["evictions"] > 0
    # 144 of 160 tokens are shared, in whole pages.
    assert figures["gain"]["found"] == pytest.approx(4 * 144 / (5 * 144 + 4 * 16 + 1), abs=0.2)
    assert figures["gain"]["ratio"] > 0
    assert "prefix cache, 90% shared" in capsys.readouterr().out


def test_a_load_whose_requests_fail_gives_no_figures(bench):
    clock, settings = OpClock(), bench._settings(2)
    free = FreeModel(6000, 2)
    built = timed_executor(settings, bench._files.spec, free, free, bench._sampling_ops(), clock)
    load = engine_prefix.Load(1, 1, prompt=4, output=1000)
    with engine_loop(settings, bench._files, built) as loop:
        with pytest.raises(LoopError, match="ended with error"):
            engine_prefix.run_load(loop, clock, load, [[6000] * 4])
        with pytest.raises(LoopError, match="0 of 1 requests"):
            loop.submit([6000], SamplingParams())
            engine_host.wait_for(loop, 1, seconds=0.1)


def test_an_idle_engine_is_not_stepped_before_its_last_output_is_here(bench, monkeypatch):
    """It would sleep a second in that step, which would count as the request's."""

    class Late:
        """A socket through which each message takes longer than a short wait."""

        def __init__(self, inner):
            self._inner = inner
            self.recv, self.send = inner.recv, inner.send

        def poll(self, milliseconds):
            return self._inner.poll(milliseconds) if milliseconds > 500 else 0

    settings, free = bench._settings(2), FreeModel(6000, 2)
    built = timed_executor(settings, bench._files.spec, free, free, bench._sampling_ops(), OpClock())
    with engine_loop(settings, bench._files, built) as loop:
        monkeypatch.setattr(loop, "_socket", Late(loop._socket))
        loop.submit([1, 2], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3))
        engine_host.wait_for(loop, 1)
        while loop.num_queued:
            assert loop.receive() == []  # nothing is waited for while there is something to compute
            loop.step()
        outputs = loop.receive()
        assert sum(len(output.token_ids) for output in outputs) == 3
        assert outputs[-1].finish is not None


def test_memory_is_sampled_while_all_kinds_of_requests_run():
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


def test_children_are_told_apart_by_their_modules():
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    commands = [[sys.executable, "-c", code], [sys.executable, "-m", "json.tool"]]
    children = [subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for c in commands]
    try:
        assert children[0].stdout.readline() == "up\n"
        held = process_memory.children_by_module(os.getpid())
        name = next(name for name in held if name.startswith("python"))
        assert held[name] == pytest.approx(process_memory.resident_bytes(children[0].pid), rel=0.5)
        assert "json.tool" in held
    finally:
        for child in children:
            child.communicate("{}")
    with pytest.raises(OSError, match=str(children[0].pid)):
        process_memory.resident_bytes(children[0].pid)
