"""Tests of gpu_check on the CPU: cost model, verdicts, and the plans that drive an executor."""

from __future__ import annotations

import json
import math
import sys
import threading
import time

import pytest
import torch

from kernels.common.triton.compilations import Benchmark
from scripts._bench import gpu_check, gpu_check_equality, gpu_check_kernels, gpu_check_report, gpu_check_tests
from scripts._bench.gpu_check_child import Child
from scripts._bench.gpu_check_model import LLAMA_8B, SMALL, RandomWeights, fitted, step_cost
from scripts._bench.gpu_check_plans import Generated, new_rows, num_pages, random_prompts, steps
from scripts._bench.gpu_check_speed import idle_times, kernel_times, run_host
from scripts._bench.gpu_check_speed import run as run_speed
from scripts._bench.measurements import Roofline
from worker.model.families import required_shapes

MACHINE = Roofline("a GPU", bandwidth=4e12, operations=800e12, measured=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_reported(capsys):
    assert gpu_check.main([]) == 2
    output = capsys.readouterr()
    assert "no GPU" in output.err
    assert output.out == ""


def test_missing_modules_are_named(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "REQUIRED", ("torch", "no_such_module"))
    assert gpu_check.main([]) == 2
    assert f"{sys.executable} has no no_such_module" in capsys.readouterr().err


def test_roofline_gives_minimum_times():
    assert MACHINE.floor_ms(4e9) == pytest.approx(1.0)
    assert MACHINE.floor_ms(4e9, 1.6e12) == pytest.approx(2.0)
    assert MACHINE.floor_ms(4e9, 1.6e12, speed=2.0) == pytest.approx(1.0)


def test_step_cost_of_llama_8b_matches_published_sizes():
    cost = step_cost(LLAMA_8B, 1, 1, 0)
    assert cost.num_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert step_cost(LLAMA_8B, 1, 1, 1000).num_bytes - cost.num_bytes == 1000 * 128 * 1024
    prefill = step_cost(LLAMA_8B, 1, 2048, 0).num_operations / 2048
    assert prefill == pytest.approx(14.0e9 + 0.5e9, rel=0.01)
    assert step_cost(LLAMA_8B, 1, 1, 0, "int4").num_bytes == pytest.approx(4.76e9, rel=0.01)


def test_number_of_layers_is_reduced_to_fit_memory():
    assert fitted(LLAMA_8B, 140 << 30, "bf16") is LLAMA_8B
    small = fitted(LLAMA_8B, 24 << 30, "bf16")
    assert 16 < small.num_layers < 32
    assert small.kv_groups[0].layers == tuple(range(small.num_layers))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
def test_random_weights_are_scaled_reproducible_and_have_distinct_rows(kind):
    weights = RandomWeights(SMALL, kind)
    assert set(weights.names()) == set(required_shapes(SMALL))
    for name in ("layers.1.down.weight", "layers.1.q.weight", "embed.weight"):
        values = weights.get(name).dequantize(torch.float32)
        assert values.shape == weights.shape(name)
        assert values.std() * values.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.05)
        assert len(values.unique(dim=0)) == len(values)
    again = RandomWeights(SMALL, kind).get("layers.1.q.weight")
    assert torch.equal(again.dequantize(torch.float32), weights.get("layers.1.q.weight").dequantize(torch.float32))


def test_prompts_are_chunked_beside_decoding_requests():
    prompts = random_prompts([5, 2], 100)
    planned = [
        [(item.row, item.start, item.count, item.sample) for item in items] for items in steps(prompts, 2, 3, False)
    ]
    assert planned == [
        [(0, 0, 2, False), (1, 0, 2, True)],
        [(0, 2, 2, False), (1, 2, 1, True)],
        [(0, 4, 1, True), (1, 3, 1, True)],
        [(0, 5, 1, True)],
        [(0, 6, 1, True)],
    ]
    tables = new_rows(prompts, 4, 3).block_tables
    assert [table.pages for table in tables] == [[0, 1], [2, 3]]
    assert num_pages(prompts, 4, 3) == 4


@pytest.fixture
def _restored_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_restored_threads")
def test_speed_part_runs_on_small_model():
    settings = gpu_check_equality.settings_for("cpu", num_threads=1)
    loads = [(1, 16), (3, 33), (8, 4000)]
    rows = list(run_speed(MACHINE, spec=SMALL, settings=settings, decodes=loads, prefills=[(2, 20)], num_steps=4))
    assert [row["name"].split(" bf16")[0] for row in rows] == [
        "decode 1 x 16",
        "decode 3 x 33",
        "decode 8 x 4000",
        "prefill 2 x 20",
    ]
    assert "pages" in rows[2]["error"]
    for row in (rows[0], rows[1], rows[3]):
        assert 0 < row["share"] == pytest.approx(row["floor_ms"] / row["ms"])
    assert rows[1]["tokens_per_second"] == pytest.approx(3000 / rows[1]["ms"])
    assert rows[0]["host_us"] > 0


@pytest.mark.usefixtures("_restored_threads")
def test_host_part_times_each_phase_of_a_step():
    rows = list(run_host("cpu", counts=(2, 3), num_steps=8, dtype="float32", num_threads=1))
    assert [row["name"] for row in rows] == ["host, 2 requests", "host, 3 requests"]
    for row in rows:
        parts = [row[name] for name in ("schedule_us", "submit_us", "result_us", "apply_us")]
        assert all(part > 0 for part in parts)
        assert row["host_us"] == pytest.approx(sum(parts))
    line = gpu_check_report.table({"machine": {"error": "none"}, "host": rows})[3]
    assert line.split()[:3] == ["host,", "2", "requests"]


@pytest.mark.usefixtures("_restored_threads")
def test_outputs_do_not_depend_on_chunk_size(monkeypatch):
    monkeypatch.setattr(gpu_check_equality, "NUM_TOKENS", 6)
    settings = gpu_check_equality.settings_for("cpu", num_threads=1)
    one = gpu_check_equality.outputs(settings, lengths=(3, 40), chunk=16)
    other = gpu_check_equality.outputs(settings, lengths=(3, 40), chunk=64)
    assert gpu_check_equality.same_tokens(one, other) == (True, "12 tokens")
    assert [len(of.prompt_logprobs) for of in one] == [2, 39]
    assert gpu_check_equality.close_logprobs(one, other, 1e-4)[0]


def test_differing_outputs_are_detected():
    left = [Generated([1, 2], [-1.0]), Generated([3], [-2.0])]
    assert not gpu_check_equality.same_tokens(left, [Generated([1, 2]), Generated([4])])[0]
    right = [Generated([1, 2], [-1.1]), Generated([3], [-2.3])]
    assert gpu_check_equality.close_logprobs(left, right, 0.21)[0]
    assert not gpu_check_equality.close_logprobs(left, right, 0.19)[0]
    assert not gpu_check_equality.close_logprobs(left, [Generated([1], [math.nan]), Generated([3], [-2.0])], 9.0)[0]


def test_kernel_time_uses_all_runs_and_failure_is_one_row():
    calls = []
    benchmark = Benchmark("copy", (lambda: calls.append(0), lambda: calls.append(1)), num_bytes=4_000_000)

    def timer(runs):
        for run in runs:
            run()
        return 0.002

    row = gpu_check_kernels.time_one("folder", benchmark, MACHINE, timer)
    assert calls == [0, 1]
    assert row["share"] == pytest.approx(0.5)
    broken = Benchmark("broken", (lambda: 1 // 0,), num_bytes=1)
    assert gpu_check_kernels.time_one("folder", broken, MACHINE, timer)["error"].startswith("ZeroDivisionError")


RESULTS = [
    {
        "collected": [
            f"tests/kernels/test_{name}" for name in ("norm.py::a[1]", "norm.py::b", "rope.py::c", "late.py::d")
        ]
    },
    {"id": "tests/kernels/test_norm.py::a[1]", "outcome": "passed", "message": ""},
    {"id": "tests/kernels/test_norm.py::b", "outcome": "skipped", "message": ""},
    {"id": "tests/kernels/test_rope.py::c", "outcome": "failed", "message": "assert no"},
    {"id": "tests/kernels/test_gone.py", "outcome": "failed", "message": "ModuleNotFoundError: x"},
]


def test_kernel_verdict_requires_passed_tests(tmp_path):
    files = gpu_check_tests.counts([json.dumps(result) for result in RESULTS])
    assert files["test_norm"]["passed"] == files["test_norm"]["skipped"] == 1
    assert files["test_norm"]["failures"] == []
    assert files["test_rope"]["failures"] == ["c: assert no"]
    assert files["test_gone"]["failures"] == ["cannot be imported: ModuleNotFoundError: x"]
    assert files["test_late"]["unfinished"] == 1
    uses = {"norm": ["norm"], "rope": ["norm", "rope"], "gone": ["gone"], "late": ["late"]}
    for name, kernels in uses.items():
        source = "".join(f"from kernels.ops.{kernel} import reference\n" for kernel in kernels)
        (tmp_path / f"test_{name}.py").write_text(source)
    wanted = {"norm": False, "rope": False, "gone": None, "untested": False, "late": None}
    assert gpu_check_tests.verdicts(list(wanted), files, tmp_path) == wanted
    del files["test_rope"]
    assert gpu_check_tests.verdicts(["norm", "rope"], files, tmp_path) == {"norm": True, "rope": False}


TESTS = """
import time
def test_good(): assert True
def test_bad(): assert 1 == 2
def test_long(): time.sleep({seconds})
"""


@pytest.mark.parametrize("seconds", [0, 90])
def test_interrupted_test_run_keeps_results(tmp_path, seconds):
    (tmp_path / "test_these.py").write_text(TESTS.format(seconds=seconds))
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    stopped, results = threading.Event(), tmp_path / "log.jsonl"

    def stop() -> None:
        while not (results.exists() and all(name in results.read_text() for name in ('good", "o', "1 == 2"))):
            time.sleep(0.1)
        stopped.set()

    if seconds:
        threading.Thread(target=stop, daemon=True).start()
    files = [str(tmp_path / name) for name in ("test_these.py", "test_broken.py")]
    found = gpu_check_tests.run(50, tmp_path / "log", stopped, files)
    these = found["files"]["test_these"]
    assert (these["passed"], these["failed"]) == (1 if seconds else 2, 1)
    assert these["unfinished"] == (1 if seconds else 0)
    assert these["failures"] == ["test_bad: assert 1 == 2"]
    (broken,) = found["files"]["test_broken"]["failures"]
    assert "no_such_module" in broken
    assert ("error" in found) == bool(seconds)


def test_times_of_kernels_and_between_them():
    # Two steps of two overlapping kernels, 1 us apart inside a step and 10 us between them.
    kernels = [(0.0, 5.0), (2.0, 6.0), (7.0, 9.0), (19.0, 24.0), (25.0, 30.0)]
    assert idle_times(kernels, 2) == {"step_gap_us": 10.0, "idle_us": 6.0}
    assert idle_times([], 2) == {"step_gap_us": 0.0, "idle_us": 0.0}
    # Times of kernels are sorted, the longest first.
    events = [("short", 0.0, 1.0), ("long", 1.0, 7.0), ("short", 8.0, 9.0), ("long", 9.0, 15.0), ("short", 16.0, 19.0)]
    assert kernel_times(events, 2) == [("long", 1.0, 6.0), ("short", 1.5, 2.5)]


def test_crashed_or_hung_part_gives_error_row(tmp_path):
    def child(source, seconds=30.0, silence=None, stopped=False):
        event = threading.Event()
        if stopped:
            event.set()
        log = tmp_path / "log"
        log.write_text("")
        return Child("speed", (sys.executable, "-c", source), log, event).rows(seconds, silence)

    two = "print('noise'); print('ROW {\"name\": 1}'); print('ROW {\"name\": 2}', flush=True); "
    assert child(two + "print('DONE'); print('more')") == [{"name": 1}, {"name": 2}]
    assert child(two + "import sys; print('lost the GPU', file=sys.stderr); sys.exit(7)") == [
        {"name": 1},
        {"name": 2},
        {"name": "speed", "error": "ended with status 7: lost the GPU"},
    ]
    assert "status -" in child("import os; os.kill(os.getpid(), 9)")[0]["error"]
    assert child("import time; time.sleep(60)", seconds=0.2)[0]["error"] == "not finished after 0 s"
    assert child("import time; time.sleep(60)", silence=0.2)[0]["error"].startswith("hung")
    assert child("import time; time.sleep(60)", stopped=True)[0]["error"] == "stopped"


def test_kernels_after_a_crash_are_timed(monkeypatch, tmp_path):
    asked = []

    def rows(self, part, argument="", until=0.0):
        if part != "kernels":
            return []
        asked.append(argument)
        if len(asked) == 1:
            dead = {"name": "kernels", "error": "lost the GPU"}
            return [{"begin": "norm"}, {"name": "norm 1", "ms": 1.0}, {"begin": "quantize"}, dead]
        return [{"begin": "rope_kv"}, {"name": "rope 1", "ms": 1.0}]

    monkeypatch.setattr(gpu_check.Check, "_rows", rows)
    check = gpu_check.Check(100.0, tmp_path, threading.Event(), reserve=False)
    check._time_kernels(["norm", "quantize", "rope_kv"])
    assert asked == ["norm quantize rope_kv", "rope_kv"]
    timed = {kernel: found["rows"] for kernel, found in check.found["kernels"].items()}
    assert timed["norm"] == [{"name": "norm 1", "ms": 1.0}]
    assert timed["quantize"] == [{"name": "kernels", "error": "lost the GPU"}]
    assert timed["rope_kv"] == [{"name": "rope 1", "ms": 1.0}]


def test_goals_are_listed_beside_figures():
    speed = [
        {"name": "decode 1 x 1024 bf16", "ms": 4.0, "tokens_per_second": 250.0},
        {"name": "decode 1 x 16384 bf16", "ms": 4.3072, "tokens_per_second": 232.0},
        {"name": "prefill 1 x 2048 bf16", "error": "broke"},
    ]
    rows = [{"name": f"int4 {layer} rows=1", "share": 0.9} for layer in ("qkv", "o", "gate_up", "down")]
    report = {"speed": {"bf16": speed}, "kernels": {"linear_weight_only": {"tests_passed": True, "rows": rows}}}
    lines = {line[:34].strip(): line[34:].split() for line in gpu_check_report.goal_lines(report)}
    assert lines["decode of one request, bf16"] == ["256", "250.0", "tok/s", "missed"]
    assert lines["a token of context, bf16 cells"] == ["3", "2.0", "1e-5", "ms"]
    assert lines["int4 product, one row"] == ["80", "90.0", "%", "of", "HBM"]
    assert lines["prefill of 2048 tokens, bf16"][:3] == ["41000", "not", "measured"]


def test_table_lists_failures_and_hides_speed_of_failed_kernels():
    times = {"ms": 2.0, "floor_ms": 1.0, "share": 0.5}
    report = {
        "machine": {"name": "a GPU", "bandwidth": 4e12, "operations": 8e14, "measured": False},
        "tests": {
            "files": {
                "test_rope": {"passed": 1, "skipped": 0, "failed": 1, "unfinished": 0, "failures": ["test_c: no"]}
            }
        },
        "kernels": {
            "norm": {"tests_passed": True, "rows": [{"name": "norm 1"} | times, {"name": "norm 2", "error": "broke"}]},
            "rope": {"tests_passed": False, "rows": [{"name": "rope 1"} | times]},
            "gone": {"tests_passed": True, "rows": [{"name": "kernels", "error": "ended with status 1"}]},
            "late": {"tests_passed": None, "rows": [{"name": "late 1", "tflops": 450.0} | times]},
        },
        "equality": [{"name": "tokens", "ok": False, "detail": "differs"}, {"name": "kv", "ok": True, "detail": "x"}],
        "speed": {"bf16": [{"name": "decode 1", "tokens_per_second": 256.0, "host_us": 90.0} | times]},
    }
    json.dumps(report)
    lines = gpu_check_report.table(report)
    assert next(line for line in lines if line.startswith("norm 1")).split()[-3:] == ["2.0000", "1.0000", "50.0%"]
    late = next(line for line in lines if line.startswith("late 1"))
    assert late.split()[-3:] == ["450", "TFLOP/s", "?"]
    assert "not reported" in next(line for line in lines if line.startswith("rope 1"))
    assert gpu_check_report.failures(report) == [
        "test_rope: failed tests: 1, the first is test_c: no",
        "time of norm, norm 2: broke",
        "time of gone, kernels: ended with status 1",
        "tokens: differs",
    ]
    assert lines[-4:] == [f"FAILED: {text}" for text in gpu_check_report.failures(report)]
    good = {"machine": report["machine"], "equality": [{"name": "kv", "ok": True, "detail": "x"}]}
    assert gpu_check_report.table(good)[-1] == "all passed"
    assert gpu_check_report.failures(good | {"host": [{"name": "host", "error": "hung"}]}) == ["host, host: hung"]
    assert gpu_check_report.failures(good | {"stopped": "early"}) == ["stopped early"]
