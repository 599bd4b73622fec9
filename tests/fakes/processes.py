"""Pelton's programs as child processes of tests: their environment, where they listen, their end."""

from __future__ import annotations

import os
import re
import signal
import subprocess


def plain_environment(**changes: str) -> dict[str, str]:
    """The tests' environment without settings of Pelton's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PELTON_")} | changes


def listening_url(log: str) -> str | None:
    """Where a gateway listens, from what it has logged as JSON; None before it does."""
    found = re.search(r'"url":"([^"]+)"', log)
    return None if found is None else found[1]


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """SIGTERM, and SIGKILL where that is not enough within some seconds. Does nothing to what has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
