"""Part of gpu_check: the kernels' own tests on the GPU, and which kernels may be trusted after them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts._bench.gpu_check_child import ROOT, Child

TESTS = ROOT / "tests" / "kernels"
_ALL = (str(TESTS), "--all")
"""Also those that are slow in the interpreter."""
_NOT_HERE = ("test_kernels_report.py",)
"""What compiles for other GPUs and runs on none."""
_TEST_SECONDS = 120
_MOST_WORKERS = 12
# Defined in pyproject.toml for a machine with all of pytest's plugins, and strict: a warning that only a GPU's torch
# gives would fail its test.
_PYTEST = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "-rfE", "--tb=short")


def run(seconds: float, log: Path, stopped: threading.Event, arguments: Sequence[str] = _ALL) -> dict[str, Any]:
    """Runs tests/kernels and returns the counts of each file, with the names of the tests that failed.

    Args:
        seconds: after which the run is ended; `error` then says so, beside what it had found.
        log: takes what pytest prints, and a file beside it the results.
        stopped: ends the run, as the end of the time does.
        arguments: of pytest, besides those that make it write results down.
    """
    reports = log.with_suffix(".jsonl")
    reports.write_text("")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Each worker compiles and the GPU computes: threads of torch would only be in the way.
    environment |= {"GPU_CHECK_REPORTS": str(reports), "OMP_NUM_THREADS": "2"}
    found = Child("tests", _command(arguments), log, stopped, environment).rows(seconds)
    # 0 and 1: all have run, and some may have failed. Those are in the counts.
    error = next((row["error"] for row in found if "error" in row), None)
    files = counts(reports.read_text("utf-8").splitlines())
    result: dict[str, Any] = {"files": files}
    if not files or (error and any(file["unfinished"] for file in files.values())):
        result["error"] = error
    return result


def _command(arguments: Sequence[str]) -> list[str]:
    def there(module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    # stdout is for rows: pytest's output goes with the errors.
    start = "import os, sys, pytest; os.dup2(2, 1); sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *_PYTEST, "-p", "scripts._bench.gpu_check_plugin"]
    command += ["--continue-on-collection-errors", *(f"--ignore={TESTS / name}" for name in _NOT_HERE)]
    if there("pytest_timeout"):
        command.append(f"--timeout={_TEST_SECONDS}")
    if there("xdist"):
        # Compiling takes longer than running; the compiler uses one core each.
        command += ["-n", str(min(_MOST_WORKERS, os.cpu_count() or 1)), "--dist=worksteal"]
    return [*command, *arguments]


def counts(lines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of the plugin's lines: test file -> passed, skipped, failed, unfinished, and which failed with what message."""
    files: dict[str, dict[str, Any]] = {}
    waiting: set[str] = set()

    def file_of(test: str) -> dict[str, Any]:
        empty = {"passed": 0, "skipped": 0, "failed": 0, "unfinished": 0, "imported": True, "failures": []}
        return files.setdefault(Path(test.partition("::")[0]).stem, empty)

    for line in map(json.loads, lines):
        if "collected" in line:
            waiting.update(line["collected"])
            continue
        waiting.discard(line["id"])
        found = file_of(line["id"])
        found[line["outcome"]] += 1
        if line["outcome"] == "failed":
            name = line["id"].partition("::")[2]
            found["imported"] &= bool(name)
            name = name or "cannot be imported"
            found["failures"].append(f"{name}: {line['message']}")
    for test in waiting:
        file_of(test)["unfinished"] += 1
    return files


def verdicts(
    kernels: Sequence[str], files: Mapping[str, Mapping[str, Any]], tests: Path = TESTS
) -> dict[str, bool | None]:
    """Kernel folder -> whether tests that use it have run and none of them failed; None where some have not run."""
    sources = {path.stem: path.read_text("utf-8") for path in tests.glob("test_*.py")}
    found: dict[str, bool | None] = {}
    for kernel in kernels:
        using = [files[name] for name, source in sources.items() if f"kernels.ops.{kernel}" in source and name in files]
        if any(file["failed"] and file["imported"] for file in using):
            found[kernel] = False
        elif any(file["unfinished"] or not file["imported"] for file in using):
            found[kernel] = None
        else:
            found[kernel] = any(file["passed"] for file in using)
    return found
