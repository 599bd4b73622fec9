"""Checks of scripts/kernels_report on prepared results, and one complete run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from kernels.common.triton.compilations import TARGETS, Compilation
from scripts._bench import kernels_report
from scripts._bench.kernels_report import Compiled
from tests.architecture.source import ROOT

WGMMA = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
TCGEN05 = "tcgen05.mma.cta_group::1.kind::f16"
MFMA = "v_mfma_f32_32x32x8_bf16"
KERNEL = Compilation("k", "bf16", None, {}, {"num_warps": 4})


def _problems(target, compilation: Compilation = KERNEL, **resources) -> list[str]:
    usual = {"registers": 80, "spilled_bytes": 0, "shared_memory": 0, "matrix_instructions": ()}
    return kernels_report.problems(compilation, target, Compiled(**(usual | resources)))


def _product(product, rows: int) -> Compilation:
    return dataclasses.replace(KERNEL, product=product, rows=rows)


_LOOPS = """
  tt.func public @k(%n: i32 loc("n"(#loc))) {
    %total:2 = scf.for %i = %c0 to %n step %c1 iter_args(%first = %n, %sum = %zero) -> (i32, tensor<2x4xf32>)  : i32 {
      %next = arith.addi %first, %n : i32 loc(#loc2)
      %end = arith.minsi %next, %n : i32 loc(#loc2)
      %acc = scf.for %k = %first to %end step %c1 iter_args(%inner = %zero) -> (tensor<2x4xf32>)  : i32 {
        %other = arith.addf %inner, %zero : tensor<2x4xf32> loc(#loc2)
        scf.yield %other : tensor<2x4xf32> loc(#loc2)
      } loc(#loc2)
      scf.yield %next, %acc : i32, tensor<2x4xf32> loc(#loc2)
    } loc(#loc2)
"""


def test_inner_loop_bounds_must_not_be_loop_carried() -> None:
    assert kernels_report.carried_bounds(_LOOPS) == ("%first",)
    read = _LOOPS.replace("%other = arith.addf %inner, %zero", "%other = tt.splat %first")
    assert kernels_report.carried_bounds(read) == ()  # kept alive by a reader
    assert kernels_report.carried_bounds(_LOOPS.replace("%k = %first to %end", "%k = %c0 to %n")) == ()
    assert "%first" in _problems("sm_90", carried_bounds=("%first",))[0]


@pytest.mark.parametrize("target", TARGETS)
def test_spills_shared_memory_and_threads(target) -> None:
    assert _problems(target) == []
    assert _problems(target, spilled_bytes=8) == ["spills 8 bytes, 0 allowed"]
    assert _problems(target, dataclasses.replace(KERNEL, spills_allowed=8), spilled_bytes=8) == []
    limit = kernels_report.SHARED_MEMORY[target]
    assert _problems(target, shared_memory=limit) == []
    assert "shared memory" in _problems(target, shared_memory=limit + 1)[0]
    assert "threads" in _problems(target, dataclasses.replace(KERNEL, options={"num_warps": 64}))[0]


@pytest.mark.parametrize(
    ("target", "rows", "right", "wrong"),
    [
        ("sm_80", 128, MMA, WGMMA),
        ("sm_90", 64, WGMMA, MMA),
        ("sm_90", 16, MMA, WGMMA),
        ("sm_100", 128, TCGEN05, WGMMA),
        ("sm_100", 16, MMA, WGMMA),
        ("gfx942", 128, MFMA, MMA),
    ],
)
def test_matrix_instructions(target, rows: int, right: str, wrong: str) -> None:
    kernel = _product("bf16", rows)
    assert _problems(target, kernel, matrix_instructions=(right,)) == []
    assert any(text.startswith("no ") for text in _problems(target, kernel))
    assert _problems(target, kernel, matrix_instructions=(right, wrong)) == [f"unexpected {wrong}"]
    assert _problems(target, KERNEL, matrix_instructions=(right,)) == [f"unexpected {right}"]


def test_operands() -> None:
    tf32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    assert _problems("sm_90", _product("fp32", 64)) == []
    assert f"unexpected {tf32}" in _problems("sm_90", _product("fp32", 64), matrix_instructions=(tf32,))
    assert _problems("sm_80", _product("bf16", 64), matrix_instructions=(tf32,)) == [f"{tf32} does not multiply bf16"]
    fp16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    assert _problems("sm_80", _product("fp16", 64), matrix_instructions=(MMA, fp16)) == []
    assert _problems("sm_80", _product("bf16", 64), matrix_instructions=(fp16,)) == [f"{fp16} does not multiply bf16"]
    assert _problems("sm_90", _product("int8", 64), matrix_instructions=(WGMMA,)) == [f"{WGMMA} does not multiply int8"]
    assert _problems("sm_90", _product("fp8", 64), matrix_instructions=(WGMMA,)) == [f"{WGMMA} does not multiply fp8"]
    int8 = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
    fp8 = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
    assert _problems("sm_90", _product("int8", 64), matrix_instructions=(int8,)) == []
    assert _problems("sm_90", _product("fp8", 64), matrix_instructions=(fp8,)) == []
    assert _problems("gfx942", _product("fp32", 64), matrix_instructions=("v_mfma_f32_16x16x4_f32",)) == []
    assert _problems("gfx942", _product("fp32", 64), matrix_instructions=(MFMA,)) == [f"{MFMA} does not multiply fp32"]
    assert _problems("gfx942", _product("int8", 64), matrix_instructions=("v_mfma_i32_16x16x32_i8",)) == []


def test_compiler_output_is_parsed() -> None:
    ptx = f"  {WGMMA} {{%f1}}, %rd1, p, 1;\n  {MMA} {{%f1}};\n  {MMA} {{%f2}};\n  // no comma.sync\n"
    assert kernels_report.matrix_instructions(ptx) == (MMA, WGMMA)
    assert kernels_report.matrix_instructions("\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], 0\n") == (MFMA,)
    listing = (
        "Resource usage:\n Common:\n  GLOBAL:0\n Function k:\n  REG:42 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:600\n"
    )
    assert kernels_report.nvidia_resources(listing) == (42, 16)
    metadata = "    .private_segment_fixed_size: 24\n    .vgpr_count:     46\n    .vgpr_spill_count: 5\n"
    assert kernels_report.amd_resources(metadata) == (46, 24)
    with pytest.raises(ValueError, match="expected one kernel"):
        kernels_report.nvidia_resources(listing * 2)
    with pytest.raises(ValueError, match="expected one kernel"):
        kernels_report.amd_resources("")


def test_selection() -> None:
    listed = [dataclasses.replace(KERNEL, kernel=name) for name in ("split", "split", "reduce", "reduce")]
    assert kernels_report.select(listed, None, "attention", quick=False) == [0, 1, 2, 3]
    assert kernels_report.select(listed, None, "attention", quick=True) == [0, 2]
    assert kernels_report.select(listed, "reduce", "attention", quick=True) == [2]
    assert kernels_report.select(listed, "attention", "attention", quick=True) == [0, 2]
    assert kernels_report.select(listed, "norm", "attention", quick=False) == []


def test_unreadable_table_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: str, target) -> list[Compilation]:
        if folder == "norm":
            raise KeyError(target)
        return [KERNEL]

    monkeypatch.setattr(kernels_report, "folders", lambda: ["activation", "norm"])
    monkeypatch.setattr(kernels_report, "compilations", broken)
    tasks, lines = kernels_report.plan(["sm_90"], None, quick=True)
    assert tasks == [("activation", "sm_90", 0)]
    assert [line["kernel"] for line in lines] == ["norm"]
    assert "KeyError" in lines[0]["problems"][0]


def test_compiler_crash_is_reported_as_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('noise', flush=True); sys.stdin.readline() and sys.exit(3)"
    monkeypatch.setattr(kernels_report, "compilations", lambda folder, target: [KERNEL])
    compiler = kernels_report.Compiler((sys.executable, "-c", program))
    for _ in range(2):
        answer = compiler.run(kernels_report.Task("k", "sm_90", 0))
        assert answer["problems"] == ["the compiler crashed with status 3"]
    compiler.close()


@pytest.mark.slow  # scripts/test runs the report too
def test_complete_run() -> None:
    """Run the report; the kernels are compiled in a separate process, also when tests are interpreted."""
    result = subprocess.run(
        [
            str(ROOT / "scripts" / "kernels_report"),
            *("--quick", "--kernel", "embedding", "--target", "sm_90", "--target", "gfx942"),
        ],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(line["target"] for line in lines) == ["gfx942", "sm_90"]
    assert all(line["registers"] > 0 for line in lines)


def test_only_problems_are_printed_on_request(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    lines = {0: {"problems": []}, 1: {"problems": ["spills"]}}
    monkeypatch.setattr(kernels_report.Compiler, "run", lambda self, task: lines[task.number])
    monkeypatch.setattr(kernels_report, "compilations", lambda folder, target: [KERNEL, KERNEL])
    monkeypatch.setattr(kernels_report, "folders", lambda: ["norm"])
    assert kernels_report.main(["--target", "sm_90", "--only-problems"]) == 1
    assert capsys.readouterr().out == '{"problems": ["spills"]}\n'
    assert kernels_report.main(["--target", "sm_90"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert kernels_report.main(["--target", "sm_90", "--quick"]) == 0
    assert kernels_report.main(["--kernel", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
