"""Pelton's programs as child processes of tests: their environment, where they listen, their end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def plain_environment(**changes: str) -> dict[str, str]:
    """The tests' environment without settings of Pelton's, and without the notifications that systemd asks for."""
    systemds = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PELTON_")}
    return {name: value for name, value in kept.items() if name not in systemds} | changes


@contextmanager
def shared_port() -> Iterator[int]:
    """A port that only those who share ports can listen on, and that no connection is given, during the context."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def alive(pids: Iterable[int]) -> set[int]:
    """Those of the processes that have not ended. One that nobody has waited for yet, as where the first process of a
    container waits for none, has ended too.
    """
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.add(pid)
    return found


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
