"""Fixed top level, and completeness of settings and counters."""

from __future__ import annotations

import subprocess

import pytest

from shared.config import describe
from shared.metrics import WORKER_COUNTERS
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


MAX_README_LINES = 200


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < MAX_README_LINES


def test_top_level_is_fixed():
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    tracked = {line.split("/")[0] for line in listed.splitlines()}
    assert tracked - OPTIONAL == TOP_LEVEL


def test_every_counter_of_the_worker_is_shown():
    counted = {name.removesuffix("_total") for name in Counters().as_dict()}
    assert counted == set(WORKER_COUNTERS)


def test_every_setting_has_documentation():
    assert [info.name for info in describe(ServeSettings).values() if not info.doc] == []
