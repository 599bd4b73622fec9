"""Child process of gpu_check, so that a part that fails, hangs or loses the GPU affects only itself.

The process prints each result at once; results printed before its end are kept, however it ends.
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
    """Print rows as they are produced, then the end marker; called in the child process."""
    for row in rows:
        print(_ROW + json.dumps(row), flush=True)
    print(_DONE, flush=True)


def error_text(error: Exception) -> str:
    """Return the type and the first line of the message of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class Child:
    """Running child process.

    Args:
        name: Name of the part, for its error row.
        command: Program and arguments.
        log: File that receives the stderr of the process.
        stopped: Event that ends all parts; rows printed by then are kept.
        environment: Environment of the process; None for the current one.
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
        self._last_output = time.monotonic()
        with log.open("ab") as errors:
            # A session of its own, so that its children can be killed with it.
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def rows(self, seconds: float, silence: float | None = None) -> list[Row]:
        """Wait for the end of the process and return its rows, with an `error` row if it did not finish.

        Args:
            seconds: Time limit after which the process is killed.
            silence: Time without a row after which the process is killed.
        """
        end = time.monotonic() + seconds
        problem = None
        try:
            while self._process.poll() is None and problem is None:
                if self._stopped.is_set():
                    problem = "stopped"
                elif time.monotonic() > end:
                    problem = f"not finished after {seconds:.0f} s"
                elif silence is not None and time.monotonic() - self._last_output > silence:
                    problem = f"hung: no output for {silence:.0f} s"
                self._stopped.wait(_POLL_SECONDS)
        finally:
            self.stop()
        if self._done:
            return list(self._rows)
        return [*self._rows, {"name": self._name, "error": problem or self._exit_reason()}]

    def stop(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process blocked in the driver cannot be killed
            self._process.wait(5)
        self._reader.join(5)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._last_output = time.monotonic()
                if line.startswith(_ROW):
                    self._rows.append(json.loads(line.removeprefix(_ROW)))
                elif line.rstrip() == _DONE:
                    self._done = True

    def _exit_reason(self) -> str:
        last = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()][-1:]
        return f"ended with status {self._process.returncode}: {last[0] if last else 'no message'}"
