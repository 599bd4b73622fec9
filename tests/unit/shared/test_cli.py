"""The command line: dispatch by exec, errors without tracebacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shared import cli


def test_gateway_and_worker_are_executed(monkeypatch):
    lines = []
    monkeypatch.setattr(os, "execv", lambda path, line: lines.append((path, line)))
    cli.main(["worker", "folder", "--port", "1"])
    assert lines == [(sys.executable, [sys.executable, "-P", "-m", "worker", "folder", "--port", "1"])]


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("pelton 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage"),
        (["sevre"], "unknown command 'sevre'; did you mean serve?\n"),
        (["--api-key=sk-secret"], "unknown command '--api-key'\n"),
    ],
)
def test_unknown_commands_show_the_usage(argv, message, capsys):
    assert cli.main(argv) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runtime-dir", "/proc/nowhere"], "runtime_dir /proc/nowhere"),
        (["--host", "not a host", "--port", "0"], "--host not a host"),
    ],
)
def test_serve_refuses_bad_settings_with_one_line(arguments, message):
    result = subprocess.run(
        [sys.executable, "-m", "shared.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_ctrl_c_while_serve_is_imported_shows_no_traceback(monkeypatch):
    from shared import supervisor

    seen = []

    def serve(*_):
        seen.append(signal.getsignal(signal.SIGINT))
        return 0

    monkeypatch.setattr(supervisor, "serve", serve)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert cli.main(["serve"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL]
