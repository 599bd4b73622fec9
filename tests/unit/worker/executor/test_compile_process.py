"""A process that compiles beside the worker: what it leaves in the cache, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.processes import alive
from worker.executor import compile_process
from worker.executor.compile_process import CompileProcess

ROOT = Path(__file__).parents[4]

_COMPILE = """
import sys
from pathlib import Path
from kernels.common.cpu.pool import use_cache_directory
from worker.executor import compile_process
from worker.executor.compile_process import CompileProcess

folder = use_cache_directory(Path(sys.argv[1]))
beside = CompileProcess(folder, compile_process.compile_usual)
beside.start()
beside.compile_head([])
print(beside.wait(), folder)
"""

# Prints how many functions of sampling numba had to compile, and how many it found.
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
from worker.executor.compile_process import CompileProcess

beside = CompileProcess(Path("/nonexistent"), lambda kinds: time.sleep(60))
beside.start()
print(beside._pid, flush=True)
time.sleep(60)
"""


def python(program, *arguments):
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=230,
    )  # fmt: skip
    return result.stdout.split()


def started(folder, compile_all):
    process = CompileProcess(folder, compile_all)
    process.start()
    return process


def test_what_it_has_compiled_is_found_in_the_cache(tmp_path):
    succeeded, folder = python(_COMPILE, tmp_path)
    assert succeeded == "True"
    assert not compile_process.useful(Path(folder))  # the next start has nothing to do
    assert python(_COUNT, tmp_path) == ["0", "2"]


def test_the_head_is_what_the_worker_says(tmp_path):
    process = started(tmp_path, lambda kinds: (tmp_path / "kinds").write_text(repr(list(kinds()))))
    process.compile_head({(8, False), (4, True)})
    assert process.wait()
    assert (tmp_path / "kinds").read_text() == "[(4, True), (8, False)]"


@pytest.mark.parametrize(
    "compile_all",
    [lambda kinds: 1 / 0, lambda kinds: os.kill(os.getpid(), signal.SIGKILL), lambda kinds: kinds()],
    ids=["error", "killed", "no word"],
)
def test_a_failure_is_told_and_nothing_is_taken_for_compiled(tmp_path, compile_all):
    process = started(tmp_path, compile_all)
    pid = process._pid
    assert not process.wait()
    assert not alive([pid])
    assert list(tmp_path.iterdir()) == []
    process.close()


def test_a_head_for_a_process_that_has_failed_is_no_error(tmp_path):
    process = started(tmp_path, lambda kinds: 1 / 0)
    for _ in range(5000):
        if not alive([process._pid]):
            break
        time.sleep(0.01)
    process.compile_head({(8, False)})
    assert not process.wait()


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_process, "_LIMIT_SECONDS", 0.2)
    process = started(tmp_path, lambda kinds: time.sleep(60))
    pid = process._pid
    assert not process.wait()
    assert not alive([pid])


def test_closing_ends_it_and_leaves_no_zombie(tmp_path):
    process = started(tmp_path, lambda kinds: time.sleep(60))
    pid = process._pid
    process.close()
    assert not Path(f"/proc/{pid}").exists()
    process.close()


def test_it_dies_with_the_worker():
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _ORPHAN], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as worker:
        pid = int(worker.stdout.readline())
        assert alive([pid])
        time.sleep(0.3)
        worker.kill()
        worker.wait()
        for _ in range(5000):
            if not alive([pid]):
                break
            time.sleep(0.01)
        assert not alive([pid])


def test_one_processor_has_no_time_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert compile_process.useful(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not compile_process.useful(tmp_path)
