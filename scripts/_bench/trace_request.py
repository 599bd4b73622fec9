"""Trace of one streamed chat request: the gateway functions that it passes through, in order of their first call.

The gateway runs in this process and the worker is a fake one, in a thread. The trace begins with the route handler
`chat_completions` and ends when its stream is closed. The package is taken from PYTHONPATH and functions are
recognized by name, so that the script also measures other versions of the tree.

A *stop* is a run of functions of one file. A *return* is a stop in a file that was visited before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dis
import inspect
import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gateway.service
from gateway.service import Service
from shared import log
from shared.settings import GatewaySettings
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.hermes import Answers, hermes_bundle

PACKAGE = Path(gateway.service.__file__).parent
_RESUME, _RETURN = dis.opmap["RESUME"], dis.opmap["RETURN_VALUE"]
BODY = '{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
HANDLER, SUBMIT = "chat_completions", "Generator.submit"


class Tracer:
    """Profile function that records the functions called between the handler's entry and its exit."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, str] = {}
        self.num_until_submit = 0
        self._running = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Handle one event of sys.setprofile."""
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        opcode, argument = code.co_code[frame.f_lasti], code.co_code[frame.f_lasti + 1]
        # A coroutine reports a call when it is resumed, and a return when it is suspended.
        if event == "call" and not (opcode == _RESUME and argument):
            self._running = self._running or code.co_name == HANDLER
            if self._running and code not in self.functions and not _is_noise(frame):
                self.functions[code] = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"
                if code.co_qualname == SUBMIT:
                    self.num_until_submit = len(self.functions)
        elif event == "return" and code.co_name == HANDLER and opcode == _RETURN:
            self._running = False


def _is_noise(frame: FrameType) -> bool:
    """Return True for lambdas, comprehensions, properties and the transport's callback."""
    *path, name = frame.f_code.co_qualname.split(".")
    if name.startswith("<") or name == "data_received":
        return True
    owner: Any = sys.modules.get(frame.f_globals["__name__"])
    for part in path:
        owner = getattr(owner, part, None)
    return isinstance(inspect.getattr_static(owner, name, None), property)


def _summary(functions: list[str]) -> str:
    files = [file for file, _ in itertools.groupby(stop.partition(":")[0] for stop in functions)]
    num_files = len(set(files))
    return f"{len(functions)} functions, {len(files)} stops in {num_files} files, {len(files) - num_files} returns"


async def _ask(port: int, line: str, body: str = "") -> bytes:
    """Send one request, headers and body in one write, and return the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = f"Host: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Type: application/json"
    with contextlib.closing(writer):
        writer.write(f"{line} HTTP/1.1\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        return await reader.read()


async def _serve_and_ask(directory: Path, tracer: Tracer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log_writer = log.configure("error", "console", process="trace")
    service = Service(GatewaySettings(port=port, runtime_dir=str(directory)), log_writer)
    running = asyncio.create_task(service.run())
    response = b""
    while b" 200 " not in response:
        await asyncio.sleep(0.05)
        with contextlib.suppress(OSError):
            response = await _ask(port, "GET /ready")
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    response = await _ask(port, "POST /v1/chat/completions", BODY)
    sys.setprofile(None)
    assert b"[DONE]" in response, response
    os.kill(os.getpid(), signal.SIGTERM)
    await running


def main() -> None:
    """Print how many functions, stops and files one request passes through."""
    parser = argparse.ArgumentParser(prog="scripts/trace_request", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions in order")
    options = parser.parse_args()
    tracer, script = Tracer(), Answers({"hi": "Hello there."}).script
    worker: dict[str, Any] = {"model_names": ("fake",), "bundle": hermes_bundle(), "script": script, "delay": 0.001}
    with tempfile.TemporaryDirectory() as name, FakeWorker(Path(name), **worker):
        asyncio.run(_serve_and_ask(Path(name), tracer))
    functions = list(tracer.functions.values())
    if options.list:
        print("\n".join(f"{index:3} {function}" for index, function in enumerate(functions, 1)))
    print("until submit:", _summary(functions[: tracer.num_until_submit]))
    print("whole stream:", _summary(functions))


if __name__ == "__main__":
    main()
