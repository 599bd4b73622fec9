"""Part of gpu_check: the kernels' own tests on the GPU, and which kernels may be trusted after them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "kernels"
_TEST_SECONDS = 300
_WORKERS = 8


def run(seconds: float) -> dict[str, Any]:
    """Runs tests/kernels and returns the counts of each file, with the names of the tests that failed.

    Args:
        seconds: after which the run is given up; what it had found by then is lost.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={_TEST_SECONDS}"]
        # Compiling takes longer than running; the compiler uses one core each.
        command += ["-n", str(min(_WORKERS, os.cpu_count() or 1)), f"--junitxml={report}", str(TESTS)]
        finished = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if not report.exists():
            lines = (finished.stdout + finished.stderr).strip().splitlines()
            return {"error": "pytest wrote no report: " + " | ".join(lines[-3:])}
        return {"files": counts(report.read_text("utf-8"))}


def counts(report: str) -> dict[str, dict[str, Any]]:
    """Of a JUnit report: test file -> passed, skipped, failed and the names of those that failed."""
    files: dict[str, dict[str, Any]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        # A file that cannot be imported is a case whose name is the module.
        module = case.get("classname") or case.get("name") or ""
        name = next((part for part in module.split(".") if part.startswith("test_")), module)
        found = files.setdefault(name, {"passed": 0, "skipped": 0, "failed": 0, "failures": []})
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"] += 1
            found["failures"].append(case.get("name"))
        elif case.find("skipped") is not None:
            found["skipped"] += 1
        else:
            found["passed"] += 1
    return files


def verdicts(kernels: list[str], files: Mapping[str, Mapping[str, Any]], tests: Path = TESTS) -> dict[str, bool]:
    """Kernel folder -> whether tests that use it have run and none of them failed."""
    sources = {path.stem: path.read_text("utf-8") for path in tests.glob("test_*.py")}
    found = {}
    for kernel in kernels:
        using = [name for name, source in sources.items() if f"kernels.{kernel}" in source and name in files]
        passed = sum(files[name]["passed"] for name in using)
        found[kernel] = passed > 0 and not any(files[name]["failed"] for name in using)
    return found
