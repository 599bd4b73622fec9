"""Gateway process over a fake worker with prepared answers, for tests of client programs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.server import wait_until
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.hermes import Answer, Answers, hermes_bundle
from tests.fakes.http_gateway import parse_events
from tests.fakes.processes import end, listening_url, plain_environment

MODEL = "prepared"


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
    """

    def __init__(self, answers: Mapping[str, Answer], *, flags: Sequence[str] = (), **options: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pelton-prepared-")
        self.directory = Path(self._directory.name) / "r"
        self.directory.mkdir(mode=0o700)
        self._log = Path(self._directory.name) / "log"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        prepared = Answers(answers)
        fields: dict[str, Any] = {"model_names": (MODEL,), "bundle": hermes_bundle(), "delay": 0.001, **options}
        self.worker = FakeWorker(self.directory, script=prepared.script, failure=prepared.failure, **fields)
        self.url = ""

    def __enter__(self) -> PreparedServer:
        command = [sys.executable, "-m", "gateway", "--port", "0", "--runtime-dir", str(self.directory), *self._flags]
        self.worker.__enter__()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=plain_environment()
            )
        try:
            wait_until(self._is_ready, 60, "the gateway is ready")
        except BaseException:
            print(self.log())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        end(self._process, 20)
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

    def memory(self) -> int:
        """Return the resident bytes of the gateway and its child processes."""
        assert self._process is not None
        table = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
        rows = [list(map(int, line.split())) for line in table.splitlines()]
        return sum(rss for pid, parent, rss in rows if self._process.pid in (pid, parent)) << 10

    def log(self) -> str:
        """Return the log of the gateway."""
        return self._log.read_text(errors="replace")

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        if url := listening_url(self.log()):
            self.url = url
            try:
                with urllib.request.urlopen(self.url + "/ready", timeout=10) as response:
                    return bool(response.status == 200)
            except urllib.error.HTTPError as error:
                error.close()
        return False
