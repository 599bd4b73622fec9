"""Tests of scripts/setup with a fake Python: messages and exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

# Creates a .venv with itself; FAKE_PIP selects the result of an installation.
PYTHON = """\
#!/bin/bash
case "$*" in
    *"--clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "$0" >.venv/made-with ;;
    *_base_executable*) if [[ "$0" == .venv/* ]]; then cat .venv/made-with; else echo "$0"; fi ;;
    *"pip install"*)
        echo "$*" >>pip.log
        case "$FAKE_PIP" in
            fails) echo "no matching distribution" >&2; exit 1 ;;
            hangs) touch hangs; exec sleep 30 ;;
        esac ;;
esac
"""


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", checkout / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        (checkout / name).touch()
    python = tmp_path / "python3.11"
    python.write_text(PYTHON)
    python.chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(pip: str, **environment: str) -> subprocess.Popen[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE_PIP": pip, **environment}
        process = subprocess.Popen(
            ["scripts/setup"], cwd=checkout, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_failed_installation_is_reported_with_remedy(setup, tmp_path):
    process = setup("fails")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    lines = errors.splitlines()
    assert lines[0] == f"setup: creating .venv with {tmp_path}/python3.11"
    assert lines[1].startswith("setup: 1 of 4: ") and lines[2] == "no matching distribution"
    assert "PIP_INDEX_URL" in lines[-1]
    assert not (tmp_path / "checkout/.venv/pelton-setup-stamp").exists()


def test_stages_are_numbered_and_missing_model_is_named(setup, tmp_path):
    process = setup("works")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "does not contain SmolLM2-135M-Instruct.Q4_1.gguf" in errors.splitlines()[-1]
    assert [line[7:13] for line in errors.splitlines() if " of 4: " in line] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    # pip is quiet without a terminal.
    assert all("install -qq " in line for line in (tmp_path / "checkout/pip.log").read_text().splitlines())


def test_interrupted_setup_returns_130_and_can_be_resumed(setup, tmp_path):
    process = setup("hangs")
    wait_for(tmp_path / "checkout/hangs")
    second = setup("fails")
    assert second.stderr is not None
    assert second.stderr.readline() == "setup: another set-up is running here; waiting for it to finish\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("setup: interrupted; run scripts/setup again to continue\n")
    _, errors = second.communicate(timeout=60)
    assert "creating .venv" not in errors and "1 of 4" in errors


def test_given_python_is_used_or_rejected(setup, tmp_path):
    other = tmp_path / "other"
    shutil.copy(tmp_path / "python3.11", other)
    _, errors = setup("fails", PYTHON=str(other)).communicate(timeout=60)
    assert f"creating .venv with {other}\n" in errors
    shutil.rmtree(tmp_path / "checkout/.venv")
    process = setup("fails", PYTHON="/bin/false")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == "setup: error: PYTHON=/bin/false is not Python 3.11, 3.12 or 3.13 with venv\n"
    # A .venv of another Python is not replaced.
    setup("fails").communicate(timeout=60)
    process = setup("fails", PYTHON=str(other))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == (
        f"setup: error: PYTHON={other} is not the interpreter of .venv, which is {tmp_path}/python3.11: "
        "remove .venv first\n"
    )
    _, errors = setup("fails", PYTHON=str(tmp_path / "python3.11")).communicate(timeout=60)
    assert "creating .venv" not in errors and "1 of 4" in errors
