"""Gateway process, alone or over a fake worker with prepared answers, for tests of processes and client programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.e2e.server import wait_until
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.hermes import Answer, Answers, hermes_bundle
from tests.fakes.http_gateway import parse_events
from tests.fakes.processes import end, listening_url, plain_environment

MODEL = "prepared"
PATIENCE_SECONDS = 60.0


class GatewayProcess:
    """`python -m gateway` on a free port, as a context manager that ends it.

    Args:
        directory: Runtime directory. The log is a file beside it.
        flags: Command-line flags of the gateway.
        pass_fds: File descriptors that the process inherits.
        env: Environment variables.
    """

    def __init__(self, directory: Path, *flags: str, pass_fds: tuple[int, ...] = (), **env: str) -> None:
        with tempfile.NamedTemporaryFile(prefix="gateway-log-", dir=directory.parent, delete=False) as log:
            self._log = Path(log.name)
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "gateway", "--port", "0", "--runtime-dir", str(directory), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=plain_environment(**env),
                pass_fds=pass_fds,
            )

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.popen, 20)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @cached_property
    def url(self) -> str:
        """URL without /v1; waits until the gateway listens."""

        def found() -> str | None:
            assert self.popen.poll() is None, self.log()
            return listening_url(self.log())

        return str(wait_until(found, PATIENCE_SECONDS, "the gateway listens"))

    def await_ready(self, status: int = 200) -> str:
        """Wait until /ready answers with this status; return the URL."""
        try:
            wait_until(lambda: self._ready_status() == status, PATIENCE_SECONDS, f"/ready answers with {status}")
        except BaseException:
            print(self.log())
            raise
        return self.url

    def _ready_status(self) -> int:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def wait(self) -> int:
        """Wait until the process has ended; return the exit code."""
        return self.popen.wait(PATIENCE_SECONDS)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.popen.send_signal(number)
        return self.wait()


class PreparedServer:
    """Context manager that runs the gateway and its worker.

    Args:
        answers: Answer to each question; see tests.fakes.hermes.
        flags: Command-line flags of the gateway.
        options: Arguments of the FakeWorker.

    Attributes:
        url: URL of the gateway, without /v1.
        worker: The worker, which records what it receives.
        directory: The runtime directory.
        process: The gateway.
    """

    process: GatewayProcess

    def __init__(self, answers: Mapping[str, Answer], *, flags: Sequence[str] = (), **options: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pelton-prepared-")
        self.directory = Path(self._directory.name) / "r"
        self.directory.mkdir(mode=0o700)
        self._flags = flags
        prepared = Answers(answers)
        fields: dict[str, Any] = {"model_names": (MODEL,), "bundle": hermes_bundle(), "delay": 0.001, **options}
        self.worker = FakeWorker(self.directory, script=prepared.script, failure=prepared.failure, **fields)
        self.url = ""

    def __enter__(self) -> PreparedServer:
        self.worker.__enter__()
        self.process = GatewayProcess(self.directory, *self._flags)
        try:
            self.url = self.process.await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()
        self.worker.stop()
        self._directory.cleanup()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Send a request to the model; return the status, and the body parsed if it is JSON, else as bytes."""
        raw = json.dumps({"model": MODEL, **body}, ensure_ascii=False).encode()
        request = urllib.request.Request(self.url + path, raw, {"Content-Type": "application/json"})
        try:
            response = urllib.request.urlopen(request, timeout=50)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            data = response.read()
            parsed = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(data) if parsed else data

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Send a request to the model and return the events of its stream."""
        status, data = self.post(path, stream=True, **body)
        assert status == 200, data
        return parse_events(data)
