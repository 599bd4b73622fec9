"""bench_engine's part speculation: its arithmetic, and all of it once on a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from scripts._bench import engine, engine_speculation
from scripts._bench.engine_memory import SPEC, tiny_files
from scripts._bench.engine_speculation import Load, Run, by_position, figures, line
from scripts._bench.goals import Goal
from scripts._bench.gpu_check_model import RandomWeights
from worker.stats import Counters

LOAD = Load("repeat", "1 request", [[1, 2]], Goal(1.6, form=".1f", unit="x"))


def run(seconds, texts, *, steps, drafted=0, accepted=0):
    counts = {
        "engine_steps_total": steps,
        "generation_tokens_total": sum(map(len, texts)),
        "spec_decode_num_draft_tokens_total": drafted,
        "spec_decode_num_accepted_tokens_total": accepted,
        "spec_decode_draft_seconds_total": 0.25 * seconds,
    }
    return Run(seconds, texts, counts)


def test_each_run_is_compared_with_the_one_beside_it():
    # A slow moment makes both runs of the second round slow, and must not change the ratio.
    off = [run(1.0, [[1] * 10], steps=10), run(10.0, [[1] * 10], steps=10), run(1.0, [[1] * 10], steps=10)]
    drafting = [
        run(0.5, [[1] * 10], steps=4, drafted=10, accepted=6),
        run(5.0, [[1] * 10], steps=4, drafted=10, accepted=6),
        run(0.5, [[1] * 9 + [2]], steps=7, drafted=10, accepted=3),
    ]
    entry = figures(LOAD, "look-up", drafting, off)
    assert entry["ratio"] == pytest.approx(2.0)
    assert entry["tokens_per_second"] == pytest.approx(20.0)
    assert entry["tokens_per_second_off"] == pytest.approx(10.0)
    assert entry["tokens_per_step"] == pytest.approx(2.0)
    assert entry["drafts_per_step"] == pytest.approx(2.0)
    assert entry["acceptance"] == pytest.approx(0.5)
    assert entry["draft_model_share"] == pytest.approx(0.25)
    assert entry["same_texts"] == pytest.approx(2 / 3)
    assert (entry["goal"], entry["met"]) == (1.6, True)
    assert ">= 1.6x met" in line(entry, LOAD.goal)


def test_where_nothing_is_drafted_there_is_no_acceptance():
    off = [run(1.0, [[1]], steps=1)]
    entry = figures(LOAD, "look-up", off, off)
    assert entry["acceptance"] is None
    assert not entry["met"]
    assert " - " in line(entry, LOAD.goal)


def test_positions_are_shares_of_all_verifications():
    counters = Counters()
    assert by_position(counters) == "-"
    counters.count_verification(3, 2)
    counters.count_verification(3, 1)
    assert by_position(counters) == "1.00 0.50"


def test_loads_run_with_and_without(monkeypatch, capsys):
    spec = dataclasses.replace(SPEC, vocab_size=6000)
    files = dataclasses.replace(tiny_files(), spec=spec, weights=RandomWeights(spec))
    monkeypatch.setattr(engine_speculation, "OUTPUT", 6)
    monkeypatch.setattr(engine_speculation, "WARM_UPS", 1)
    arguments = ["--dtype", "float32", "--kv-cache-dtype", "float32", "--speculation-rounds", "1"]
    arguments += ["--speculation-loads", "predict", "chat16"]
    bench = engine.Bench(engine.parser().parse_args(arguments), files)
    entries = bench.speculation()
    assert [(entry["load"], entry["method"]) for entry in entries] == [
        (name, "look-up") for name in ("predict", "chat16")
    ]
    for entry in entries:
        assert entry["same_texts"] == 1.0
        assert entry["ratio"] > 0
    assert "look-up" in capsys.readouterr().out
