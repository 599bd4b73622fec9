"""Grammar processes start and end with their gateway."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.server import wait_until
from tests.fakes.prepared_server import PreparedServer
from tests.fakes.processes import alive, children


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_killed_processes_are_replaced_and_end_with_their_gateway(end):
    with PreparedServer({"hello": "x"}) as server:
        pid = server.process.popen.pid
        message = [{"role": "user", "content": "hello"}]
        for number in range(3):
            for child in children(pid):
                os.kill(child, signal.SIGKILL)
            outputs = {"structured_outputs": {"regex": f"x{{{number}}}x"}}
            assert server.post("/v1/chat/completions", messages=message, **outputs)[0] == 200
        processes = children(pid)
        assert processes
        os.kill(pid, end)
        wait_until(lambda: not alive(processes), 30, "the processes end")
