"""Plugin of pytest for gpu_check that writes each result at once, so that an interrupted run keeps its results.

It is a module of its own because gpu_check also runs where pytest is not installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

REPORTS = "GPU_CHECK_REPORTS"
"""Environment variable with the path of the file."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer in the main process; workers of pytest-xdist report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(os.environ[REPORTS]))


class _Writer:
    def __init__(self, path: str) -> None:
        self._path = path
        self._collected = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collect(list(ids))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collect([item.nodeid for item in session.items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"id": report.nodeid, "outcome": "failed", "message": _message(report)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write({"id": report.nodeid, "outcome": report.outcome, "message": _message(report)})

    def _collect(self, ids: list[str]) -> None:
        if ids and not self._collected:
            self._collected = True
            self._write({"collected": ids})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the line of a failure report that states the error."""
    if not report.failed:
        return ""
    lines = [line.removeprefix("E ").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return lines[-1] if report.when == "collect" and lines else (lines or [report.longreprtext.strip()[-200:]])[0][:300]
