"""`pelton serve` as a subprocess: started on a free port, queried over HTTP and ended by its own pid."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.fakes.processes import end, plain_environment

READY_TIMEOUT = 600.0
"""The first server compiles kernels, which takes minutes on a slow machine; this does not count as test time."""


def free_port() -> int:
    """Return a free port, below the ephemeral range if possible.

    A client connection could otherwise take the port before the server listens.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(first_given, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Any, timeout: float, what: str) -> Any:
    """Poll until the condition holds and return its value; fail the test with `what` on timeout."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout} s: {what}")


@dataclass
class Server:
    """Context manager that runs `pelton serve ARGS`."""

    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = free_port()
        self.directory = tempfile.TemporaryDirectory(prefix="pelton-e2e-")
        self.log_path = Path(self.directory.name) / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        runtime = Path(self.directory.name) / "run"
        command = [sys.executable, "-m", "shared.cli", "serve", "--port", str(self.port), "--runtime-dir", str(runtime)]
        environment = plain_environment(**self.env)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            wait_until(self.ready_or_dead, READY_TIMEOUT, "ready")
            assert self.process.poll() is None, self.log()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        assert self.process is not None
        end(self.process, 40)
        if kind is not None:
            print(self.log())
        self.directory.cleanup()

    def log(self) -> str:
        """Return the log of the processes."""
        return self.log_path.read_text(errors="replace")

    def ready_or_dead(self) -> bool:
        """Return True if the server is ready or has exited."""
        assert self.process is not None
        return self.process.poll() is not None or self.status("/ready") == 200

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, api_key: str = "none", **options: Any) -> openai.OpenAI:
        """Return the official client without retries, so that failures are visible."""
        return openai.OpenAI(base_url=self.base_url, api_key=api_key, max_retries=0, timeout=240, **options)

    def async_client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=api_key, max_retries=0, timeout=240)

    def status(self, path: str) -> int:
        """Return the status of a GET request, or 0 if the connection is refused."""
        try:
            return self.request("GET", path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def request(self, method: str, path: str, body: Any = None, api_key: str | None = None) -> tuple[int, Any]:
        """Return the status and the body, parsed if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(raw)
        return response.status, raw.decode()

    def metric(self, name: str) -> float:
        """Return the sum of a metric over all label sets."""
        status, text = self.request("GET", "/metrics", api_key="none")
        assert status == 200, text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in str(text).splitlines()
            if line.startswith((f"pelton:{name}{{", f"pelton:{name} "))
        ]
        assert values, f"no metric pelton:{name}"
        return sum(values)

    def idle(self) -> bool:
        """Return True if no request runs or waits and no page is in use, by the last reports of the workers."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def await_report(self) -> None:
        """Wait until the only worker has reported everything before this call.

        Reports come each second, so an answer can arrive before its counts. One more step is run, because the next
        report
        may be older than this call.
        """
        num_steps = self.metric("engine_steps_total")
        status, models = self.request("GET", "/v1/models", api_key="none")
        assert status == 200, models
        body = {"model": models["data"][0]["id"], "prompt": "a", "max_tokens": 1}
        status, answer = self.request("POST", "/v1/completions", body, api_key="none")
        assert status == 200, answer
        wait_until(lambda: self.metric("engine_steps_total") > num_steps, 60, "a report")

    def await_idle(self) -> None:
        """Fail the test unless the only worker becomes idle soon."""
        self.await_report()
        wait_until(self.idle, 60, "idle")

    def worker_pids(self) -> list[int]:
        """Return the process ids of this server's workers."""
        return self._children("-m worker")

    def gateway_pids(self) -> list[int]:
        """Return the process ids of this server's gateways."""
        return self._children("-m gateway")

    def _children(self, command: str) -> list[int]:
        assert self.process is not None
        children = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        return [
            int(parts[0])
            for parts in (line.split(None, 2) for line in children.splitlines())
            if int(parts[1]) == self.process.pid and command in parts[2] and "rank_main" not in parts[2]
        ]
