"""The top level is fixed, and README documents every setting and metric."""

from __future__ import annotations

import re
import subprocess

import pytest

from shared.config import describe
from shared.metrics import WORKER_COUNTERS, metric_names
from shared.settings import ServeSettings
from tests.architecture.source import ROOT
from worker.stats import Counters

TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "README.md",
    "constraints.txt",
    "docs",
    "gateway",
    "kernels",
    "pyproject.toml",
    "scripts",
    "shared",
    "systemd",
    "tests",
    "worker",
}
OPTIONAL = {"LICENSE", "CHANGELOG.md"}


def test_top_level_is_fixed():
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    tracked = {line.split("/")[0] for line in listed.splitlines()}
    assert tracked - OPTIONAL == TOP_LEVEL


def test_readme_documents_every_setting_with_its_default():
    rows = _table_rows()
    wrong = []
    for info in describe(ServeSettings).values():
        row = next((row for row in rows if f"`{info.flag}`" in row), None)
        if row is None:
            wrong.append(f"{info.flag} is missing")
        elif info.default not in ((), "") and _plain(str(info.default)) not in _plain(row):
            wrong.append(f"{info.flag}: the default {info.default} is not in its row: {row}")
    assert not wrong, "\n".join(wrong)


def test_readme_documents_no_setting_that_is_not_there():
    known = {info.flag for info in describe(ServeSettings).values()} | {"--config", "--help"}
    in_first_column = {match[1] for row in _table_rows() if (match := re.match(r"\|\s*`(--[a-z-]+)`", row))}
    assert in_first_column <= known


def test_readme_documents_every_metric():
    documented = set(re.findall(r"pelton:[a-z0-9_]+", "\n".join(_table_rows())))
    assert documented == set(metric_names())


def test_every_counter_of_the_worker_is_shown():
    counted = {name.removesuffix("_total") for name in Counters().as_dict()}
    assert counted == set(WORKER_COUNTERS)


def test_every_setting_has_documentation():
    assert [info.name for info in describe(ServeSettings).values() if not info.doc] == []


def _table_rows() -> list[str]:
    return [line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.startswith("|")]


def _plain(text: str) -> str:
    """Without what separates the digits of a number, and in lower case (True, true)."""
    return re.sub(r"(?<=\d)[_,](?=\d)", "", text).lower()
