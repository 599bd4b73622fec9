"""Grammar processes start and end with their gateway."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.server import wait_until
from tests.fakes.prepared_server import PreparedServer
from tests.fakes.processes import alive


def children(pid: int) -> set[int]:
    """Return the process ids of a gateway's grammar processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            if len(fields) > 2 and fields[0] != "Z" and int(fields[1]) == pid:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_gateway(end):
    with PreparedServer({"hello": "x"}) as server:
        process = server._process
        assert process is not None
        outputs = {"structured_outputs": {"regex": "x"}}
        message = [{"role": "user", "content": "hello"}]
        assert server.post("/v1/chat/completions", messages=message, **outputs)[0] == 200
        pids = children(process.pid)
        assert pids
        os.kill(process.pid, end)
        wait_until(lambda: not alive(pids), 30, "the processes end")


def test_killed_processes_are_replaced():
    with PreparedServer({"hello": "x"}) as server:
        process = server._process
        assert process is not None
        message = [{"role": "user", "content": "hello"}]
        for number in range(3):
            outputs = {"structured_outputs": {"regex": f"x{{{number}}}x"}}
            assert server.post("/v1/chat/completions", messages=message, **outputs)[0] == 200
            for pid in children(process.pid):
                os.kill(pid, signal.SIGKILL)
