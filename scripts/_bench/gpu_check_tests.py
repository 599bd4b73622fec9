"""Part of gpu_check: the kernel tests on the GPU, and the kernels that can be trusted after them."""

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
"""Includes the tests that are slow in the interpreter."""
_IGNORED = ("test_kernels_report.py",)
"""Compiles for other GPUs and needs none."""
_TEST_SECONDS = 120
_MAX_WORKERS = 12
# pyproject.toml assumes all plugins of pytest and makes warnings errors; a GPU build of torch may give other warnings.
_PYTEST = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "-rfE", "--tb=short")


def run(seconds: float, log: Path, stopped: threading.Event, arguments: Sequence[str] = _ALL) -> dict[str, Any]:
    """Run tests/kernels and return the counts of each file, with the names of the failed tests.

    Args:
        seconds: Time limit; when it is exceeded, the result has an `error` beside the counts so far.
        log: File for the output of pytest; the results are written to a .jsonl file beside it.
        stopped: Event that ends the run.
        arguments: Tests and further arguments of pytest.
    """
    reports = log.with_suffix(".jsonl")
    reports.write_text("")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Workers compile and the GPU computes, so threads of torch are not needed.
    environment |= {"GPU_CHECK_REPORTS": str(reports), "OMP_NUM_THREADS": "2"}
    rows = Child("tests", _command(arguments), log, stopped, environment).rows(seconds)
    error = next((row["error"] for row in rows if "error" in row), None)
    files = counts(reports.read_text("utf-8").splitlines())
    result: dict[str, Any] = {"files": files}
    # An exit status of 1 without unfinished tests only means that tests failed.
    if not files or (error and any(file["unfinished"] for file in files.values())):
        result["error"] = error
    return result


def _command(arguments: Sequence[str]) -> list[str]:
    # stdout is reserved for rows, so the output of pytest goes to stderr.
    start = "import os, sys, pytest; os.dup2(2, 1); sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *_PYTEST, "-p", "scripts._bench.gpu_check_plugin"]
    command += ["--continue-on-collection-errors", *(f"--ignore={TESTS / name}" for name in _IGNORED)]
    if importlib.util.find_spec("pytest_timeout"):
        command.append(f"--timeout={_TEST_SECONDS}")
    if importlib.util.find_spec("xdist"):
        # Compiling takes longer than running, and the compiler uses one core.
        command += ["-n", str(min(_MAX_WORKERS, os.cpu_count() or 1)), "--dist=worksteal"]
    return [*command, *arguments]


def counts(lines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Count the results that the plugin wrote.

    Returns:
        Test file -> number of tests passed, skipped, failed and unfinished, and the failures with their messages.
    """
    files: dict[str, dict[str, Any]] = {}
    pending: set[str] = set()

    def file_of(test: str) -> dict[str, Any]:
        empty = {"passed": 0, "skipped": 0, "failed": 0, "unfinished": 0, "imported": True, "failures": []}
        return files.setdefault(Path(test.partition("::")[0]).stem, empty)

    for line in map(json.loads, lines):
        if "collected" in line:
            pending.update(line["collected"])
            continue
        pending.discard(line["id"])
        found = file_of(line["id"])
        found[line["outcome"]] += 1
        if line["outcome"] == "failed":
            name = line["id"].partition("::")[2]
            found["imported"] &= bool(name)
            found["failures"].append(f"{name or 'cannot be imported'}: {line['message']}")
    for test in pending:
        file_of(test)["unfinished"] += 1
    return files


def verdicts(
    kernels: Sequence[str], files: Mapping[str, Mapping[str, Any]], tests: Path = TESTS
) -> dict[str, bool | None]:
    """Return for each kernel folder True if tests that use it ran and none failed, None if some did not run."""
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
