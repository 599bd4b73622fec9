"""Trace of one streamed chat request: the gateway functions that it passes through, in order of their first call.

The gateway runs in this process, with a fake worker in a thread. The trace lasts from the entry of the route handler to
its exit. PYTHONPATH chooses the tree that is measured.

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

from gateway import service
from shared import log
from shared.settings import GatewaySettings
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.hermes import Answers, hermes_bundle

PACKAGE = Path(service.__file__).parent
RESUME, RETURN = dis.opmap["RESUME"], dis.opmap["RETURN_VALUE"]
BODY = '{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
HANDLER, SUBMIT = "chat_completions", "Generator.submit"


class Tracer:
    """Profile function that records the functions called between the handler's entry and its exit."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, str] = {}
        self._running = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Handle one event of sys.setprofile."""
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        opcode, argument = code.co_code[frame.f_lasti], code.co_code[frame.f_lasti + 1]
        # A coroutine reports a call when it is resumed, and a return when it is suspended.
        if event == "call" and not (opcode == RESUME and argument):
            self._running = self._running or code.co_name == HANDLER
            if self._running and code not in self.functions and not _is_noise(frame):
                self.functions[code] = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"
        elif event == "return" and code.co_name == HANDLER and opcode == RETURN:
            self._running = False


def _is_noise(frame: FrameType) -> bool:
    """Return True for lambdas, comprehensions, properties and the transport's callback."""
    *path, name = frame.f_code.co_qualname.split(".")
    owner: Any = sys.modules.get(frame.f_globals["__name__"])
    for part in path:
        owner = getattr(owner, part, None)
    is_property = isinstance(inspect.getattr_static(owner, name, None), property)
    return is_property or name.startswith("<") or name == "data_received"


def _summary(functions: list[str]) -> str:
    files = [file for file, _ in itertools.groupby(stop.partition(":")[0] for stop in functions)]
    num = len(set(files))
    return f"{len(functions)} functions, {len(files)} stops in {num} files, {len(files) - num} returns"


async def _ask(port: int, line: str, body: str = "") -> bytes:
    """Send one request, headers and body in one write, and return the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = f"Host: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Type: application/json"
    writer.write(f"{line} HTTP/1.1\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return await reader.read()


async def _serve_and_ask(directory: Path, tracer: Tracer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = GatewaySettings(port=port, runtime_dir=str(directory))
    running = asyncio.create_task(service.Service(settings, log.configure("error", "console")).run())
    ready = b""
    while b" 200 " not in ready:
        await asyncio.sleep(0.05)
        with contextlib.suppress(OSError):
            ready = await _ask(port, "GET /ready")
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    assert b"[DONE]" in await _ask(port, "POST /v1/chat/completions", BODY)
    sys.setprofile(None)
    os.kill(os.getpid(), signal.SIGTERM)
    await running


def main() -> None:
    """Print how many functions, stops and files one request passes through."""
    parser = argparse.ArgumentParser(prog="scripts/trace_request", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions in order")
    is_listed = parser.parse_args().list
    tracer, script = Tracer(), Answers({"hi": "Hello there."}).script
    worker: dict[str, Any] = {"model_names": ("fake",), "bundle": hermes_bundle(), "script": script, "delay": 0.001}
    with tempfile.TemporaryDirectory() as name, FakeWorker(Path(name), **worker):
        asyncio.run(_serve_and_ask(Path(name), tracer))
    functions = list(tracer.functions.values())
    if is_listed:
        print("\n".join(f"{index:3} {function}" for index, function in enumerate(functions, 1)))
    submit = next(index for index, function in enumerate(functions) if function.endswith(f":{SUBMIT}"))
    print("until submit:", _summary(functions[: submit + 1]))
    print("whole stream:", _summary(functions))


if __name__ == "__main__":
    main()
