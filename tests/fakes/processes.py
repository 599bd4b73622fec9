"""Pelton's programs as child processes of tests: environment, listening address and termination."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def plain_environment(**changes: str) -> dict[str, str]:
    """Return the environment without Pelton's settings and without systemd's notification variables."""
    systemds = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PELTON_")}
    return {name: value for name, value in kept.items() if name not in systemds} | changes


@contextmanager
def shared_port() -> Iterator[int]:
    """Reserve a port on which only SO_REUSEPORT sockets can listen and which receives no connections."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def children(pid: int) -> set[int]:
    """Return the running child processes of a process."""
    stats = {int(path.name): _stat(path.name) for path in Path("/proc").glob("[0-9]*")}
    return {child for child, fields in stats.items() if fields[0] not in "ZX" and fields[1] == str(pid)}


def alive(pids: Iterable[int]) -> set[int]:
    """Return the processes that have not ended.

    A zombie counts as ended, because pid 1 of a container may not reap it.
    """
    return {pid for pid in pids if _stat(pid)[0] not in "ZX"}


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; X is the state of a process that no longer exists."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", ""]


_STARTS = """
import json, sys
from {program}.__main__ import main
for arguments in json.load(sys.stdin):
    print(json.dumps(arguments), main(arguments), file=sys.stderr, flush=True)
"""


def refusals(program: str, starts: list[list[str]]) -> list[str]:
    """Start a program with each list of arguments and return what it writes; each start must end with exit code 1."""
    done = subprocess.run(
        [sys.executable, "-c", _STARTS.format(program=program)],
        input=json.dumps(starts), capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    reasons, output = [], done.stderr
    for arguments in starts:
        reason, _, output = output.partition(json.dumps(arguments))
        assert output.startswith(" 1\n")
        reasons.append(reason)
    return reasons


def listening_url(log: str) -> str | None:
    """Return the gateway's URL from its JSON log, or None if it does not listen yet."""
    found = re.search(r'"url":"([^"]+)"', log)
    return None if found is None else found[1]


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Send SIGTERM, then SIGKILL after a timeout. Do nothing if the process has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
