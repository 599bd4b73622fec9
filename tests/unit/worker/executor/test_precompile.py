"""Compilation during the start: the kernels that the model uses, and the process that compiles the common ones."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels.ops.activation.cpu
import kernels.ops.attention.cpu
import kernels.ops.norm.cpu
from kernels.common.cpu import bf16
from tests.fakes.processes import alive
from tests.fakes.tiny_model import write_tiny_model
from worker.executor import precompile
from worker.executor.precompile import CompileProcess, Precompilation, is_compile_process_useful
from worker.model.loading.open_model import open_model
from worker.parallel import ParallelContext

NEEDS_INSTRUCTIONS = pytest.mark.skipif(not bf16.supported(), reason="panels need AVX512-BF16")


class FakeCompileProcess:
    """CompileProcess that records its calls."""

    def __init__(self, calls, succeeds):
        self.calls = calls
        self.succeeds = succeeds

    def compile_head(self, kinds):
        self.calls.append(("compile_head", tuple(kinds)))

    def wait(self):
        self.calls.append(("wait",))
        return self.succeeds


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return open_model(str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")), Path("/nonexistent"))


@pytest.fixture
def calls(monkeypatch):
    """Record the kernels that would be compiled, in order."""
    found = []

    def record(module, name):
        monkeypatch.setattr(module, name, lambda *arguments, **_: found.append((name, *arguments)))

    record(kernels.ops.activation.cpu, "SiluAndMul")
    record(kernels.ops.attention.cpu, "PagedAttention")
    record(precompile, "compile_for")
    record(precompile, "panel_linear")
    record(kernels.ops.norm.cpu, "AddRMSNorm")
    return found


@pytest.fixture
def spec(files):
    """Return a specification with a head size that the kernels support."""
    return replace(files.spec, num_heads=2, num_kv_heads=2, head_dim=32, rope=replace(files.spec.rope, rotary_dim=32))


def compile_all(spec, weights, compile_process=None, dtype=torch.bfloat16):
    Precompilation(
        spec,
        weights,
        ParallelContext(),
        page_size=16,
        dtype=dtype,
        kv_dtype=torch.float32,
        device=torch.device("cpu"),
        compile_process=compile_process,
    ).wait()


def names(calls):
    return [call[0] for call in calls]


@NEEDS_INSTRUCTIONS
def test_fused_layers_compile_no_single_ops(spec, files, calls):
    compile_all(spec, files.weights)
    assert names(calls) == ["AddRMSNorm", "compile_for", "panel_linear"]


@NEEDS_INSTRUCTIONS
def test_layers_that_are_not_fused_compile_each_op(spec, files, calls):
    compile_all(replace(spec, activation="gelu_tanh"), files.weights)
    assert names(calls) == ["AddRMSNorm", "PagedAttention", "panel_linear", "panel_linear"]


def test_without_panels_no_products_are_compiled(spec, files, calls):
    compile_all(spec, files.weights, dtype=torch.float32)
    assert names(calls) == ["AddRMSNorm", "PagedAttention", "SiluAndMul"]


@NEEDS_INSTRUCTIONS
@pytest.mark.parametrize("succeeds", [True, False])
def test_the_head_is_compiled_after_the_process_has_ended(spec, files, calls, succeeds):
    # If the process failed, the head is not in the cache and is compiled here.
    compile_all(spec, files.weights, FakeCompileProcess(calls, succeeds))
    assert names(calls) == ["compile_head", "AddRMSNorm", "compile_for", "wait", "panel_linear"]
    assert calls[0][1] == (calls[-1][1:3],)


ROOT = Path(__file__).parents[4]

_COMPILE = """
import sys
from pathlib import Path
from kernels.common.cpu.pool import use_cache_directory
from worker.executor.precompile import CompileProcess, compile_common_kernels

folder = use_cache_directory(Path(sys.argv[1]))
process = CompileProcess(folder, compile_common_kernels)
process.start()
process.compile_head([])
print(process.wait(), folder)
"""

# Prints the numbers of sampling functions that numba compiled and found in the cache.
_COUNT = """
import sys
from pathlib import Path
from kernels.common.cpu.pool import use_cache_directory
use_cache_directory(Path(sys.argv[1]))
from kernels.backends.cpu_sampling import CpuSamplingOps
CpuSamplingOps(1).compile()
from kernels.ops.sampling import cpu
print(sum(f.stats.cache_misses.total() for f in (cpu.sample_rows, cpu.penalize_rows)))
print(sum(f.stats.cache_hits.total() for f in (cpu.sample_rows, cpu.penalize_rows)))
"""

_ORPHAN = """
import os, time
from pathlib import Path
from worker.executor.precompile import CompileProcess

process = CompileProcess(Path("/nonexistent"), lambda kinds: time.sleep(60))
process.start()
print(process._pid, flush=True)
time.sleep(60)
"""


def python(program, *arguments):
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=230,
    )  # fmt: skip
    return result.stdout.split()


def wait_for_exit(pid):
    deadline = time.monotonic() + 50
    while alive([pid]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def started(folder, compile_all):
    process = CompileProcess(folder, compile_all)
    process.start()
    return process


def test_the_worker_finds_the_compiled_kernels_in_the_cache(tmp_path):
    succeeded, folder = python(_COMPILE, tmp_path)
    assert succeeded == "True"
    assert not is_compile_process_useful(Path(folder))  # the next start finds a complete cache
    assert python(_COUNT, tmp_path) == ["0", "2"]


def test_the_process_receives_the_kinds_of_the_head(tmp_path):
    process = started(tmp_path, lambda kinds: (tmp_path / "kinds").write_text(repr(list(kinds()))))
    process.compile_head({(8, False), (4, True)})
    assert process.wait()
    assert (tmp_path / "kinds").read_text() == "[(4, True), (8, False)]"


@pytest.mark.parametrize(
    "compile_all",
    [lambda kinds: 1 / 0, lambda kinds: os.kill(os.getpid(), signal.SIGKILL), lambda kinds: kinds()],
    ids=["error", "killed", "no word"],
)
def test_a_failure_is_reported_and_the_cache_is_not_marked_complete(tmp_path, compile_all):
    process = started(tmp_path, compile_all)
    pid = process._pid
    assert not process.wait()
    assert not alive([pid])
    assert list(tmp_path.iterdir()) == []
    process.close()


def test_sending_the_head_to_a_failed_process_is_not_an_error(tmp_path):
    process = started(tmp_path, lambda kinds: 1 / 0)
    wait_for_exit(process._pid)
    process.compile_head({(8, False)})
    assert not process.wait()


def test_a_hanging_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(precompile, "_TIMEOUT_SECONDS", 0.2)
    process = started(tmp_path, lambda kinds: time.sleep(60))
    pid = process._pid
    assert not process.wait()
    assert not alive([pid])


def test_close_kills_the_process_and_leaves_no_zombie(tmp_path):
    process = started(tmp_path, lambda kinds: time.sleep(60))
    pid = process._pid
    process.close()
    assert not Path(f"/proc/{pid}").exists()
    process.close()


def test_the_process_dies_with_the_worker():
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _ORPHAN], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as worker:
        pid = int(worker.stdout.readline())
        assert alive([pid])
        time.sleep(0.3)
        worker.kill()
        worker.wait()
        wait_for_exit(pid)


def test_the_process_is_not_useful_with_one_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert is_compile_process_useful(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not is_compile_process_useful(tmp_path)
