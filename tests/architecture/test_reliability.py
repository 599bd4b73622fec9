"""docs/reliability.md: each advisory and report that it knows has tests, and those tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.architecture.source import ROOT

DOCUMENT = ROOT / "docs" / "reliability.md"
REPORTS = {
    "2.1": {1, 2, 3, 5, 6, 7, 9, 11, 12, 14, 16, 18, 19, 20, 22, 24, 25},
    "2.2": {26, 27, 28, 29, 30, 33, 34, 36, 38},
    "2.3": {40, 42, 43, 44},
    "2.4": {45, 47, 48, 50, 52, 53, 55},
    "2.5": {57, 59, 60, 61, 62, 64, 67, 69},
    "2.7": {93},
}
"""The numbers that were given out."""
NUM_ADVISORIES = {"1.2": 26, "1.3": 13}


def sections() -> dict[str, list[list[str]]]:
    """Cells of each row, by the section's number."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in DOCUMENT.read_text("utf-8").splitlines():
        if heading := re.match(r"## ([\d.]+) ", line):
            rows = found.setdefault(heading[1], [])
        elif line.startswith("| ") and not line.startswith(("| #", "| advisory")):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_report_has_a_row():
    found = sections()
    assert {section: {int(row[0]) for row in found[section]} for section in REPORTS} == REPORTS
    assert {section: len(found[section]) for section in NUM_ADVISORIES} == NUM_ADVISORIES
    assert set(found) == {*REPORTS, *NUM_ADVISORIES}


def test_every_row_names_tests_that_exist():
    wrong = []
    for section, rows in sections().items():
        for row in rows:
            tests = re.findall(r"`([^`]+::[^`]+)`", row[-1])
            if not tests:
                wrong.append(f"{section} {row[0]} has no test")
            for test in tests:
                path, name = test.split("::")
                file = ROOT / "tests" / path
                if not (name.startswith("test_") and file.is_file() and name in functions(file)):
                    wrong.append(f"{section} {row[0]}: {test} is not there")
    assert not wrong, "\n".join(wrong)


def test_tests_name_only_reports_that_are_there():
    named = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__):
            named |= set(re.findall(r"\b(2\.[1-5]) #(\d+)", path.read_text("utf-8")))
    assert named and {(section, int(number)) for section, number in named} <= {
        (section, number) for section, numbers in REPORTS.items() for number in numbers
    }
