"""A part of gpu_check in a process of its own, so that one that fails, hangs or loses the GPU costs only itself.

The process prints each result as soon as it has it; what it printed before its end counts, however it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

_ROW = "ROW "
_DONE = "DONE"
_POLL_SECONDS = 0.05


def report(rows: Iterable[Row]) -> None:
    """What the process does: prints rows as they come, and that they are all."""
    for row in rows:
        print(_ROW + json.dumps(row), flush=True)
    print(_DONE, flush=True)


class Child:
    """Starts the process.

    Args:
        name: of the part, for its error.
        log: takes what the process writes to stderr.
        stopped: set when everything is to end; what there is by then counts.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        stopped: threading.Event,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._log = log
        self._stopped = stopped
        self._rows: list[Row] = []
        self._done = False
        self._heard = time.monotonic()
        with log.open("ab") as errors:
            # A session of its own, so that its children can be ended with it.
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def rows(self, seconds: float, silence: float | None = None) -> list[Row]:
        """Waits for the end. The rows so far, and one with an `error` where there should have been more.

        Args:
            seconds: after which the process is ended.
            silence: so long without a row, likewise.
        """
        end = time.monotonic() + seconds
        problem = None
        try:
            while self._process.poll() is None and problem is None:
                if self._stopped.is_set():
                    problem = "stopped"
                elif time.monotonic() > end:
                    problem = f"not finished after {seconds:.0f} s"
                elif silence is not None and time.monotonic() - self._heard > silence:
                    problem = f"hung: nothing for {silence:.0f} s"
                self._stopped.wait(_POLL_SECONDS)
        finally:
            self.stop()
        if self._done:
            return list(self._rows)
        return [*self._rows, {"name": self._name, "error": problem or self._ending()}]

    def stop(self) -> None:
        """Ends the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a broken driver cannot be ended
            self._process.wait(5)
        self._reader.join(5)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._heard = time.monotonic()
                if line.startswith(_ROW):
                    self._rows.append(json.loads(line.removeprefix(_ROW)))
                elif line.rstrip() == _DONE:
                    self._done = True

    def _ending(self) -> str:
        last = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()][-1:]
        return f"ended with status {self._process.returncode}: {last[0] if last else 'no message'}"
