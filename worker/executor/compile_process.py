"""A process that compiles kernels beside the worker's own start, where the cache has none of them yet.

numba compiles under one lock, and for as long as a model's layers take: a second thread would wait for it. So what does
not depend on the layers is compiled by a copy of the worker, made before it has threads, and both meet in the cache.
Once the worker is ready nothing is left that would compete with the first requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec

from shared.log import get_logger

_log = get_logger("worker.executor")

Kind = tuple[int, bool]
"""Of a weight in panels: bits, and whether blocks have a minimum."""

_COMPLETE = "complete"
_LIMIT_SECONDS = 180.0
_POLL_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1


class CompileProcess:
    """The process, seen from the worker. What it fails to compile the worker compiles itself.

    Args:
        compile_all: compiles; called in the process, with the kinds of the head as they come.
    """

    def __init__(self, folder: Path, compile_all: Callable[[Callable[[], Iterable[Kind]]], None]) -> None:
        self._mark = folder / _COMPLETE
        self._compile_all = compile_all
        self._pid: int | None = None
        self._pipe: int | None = None
        self._succeeded = False

    def start(self) -> None:
        """Forks. From the main thread, before others are started: the process lives no longer than this thread."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Of threads there are numpy's own at most, and numpy ends them before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(write_end)
            self._run(parent, read_end)
        os.close(read_end)
        self._pipe = write_end

    def compile_head(self, kinds: Iterable[Kind]) -> None:
        """Tells the process what it waits for when everything else is done: the kinds of the head's weight."""
        if self._pipe is not None:
            # A process that has failed reads no more; `wait` finds that out.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, msgspec.json.encode(sorted(kinds)))
            self._close_pipe()

    def wait(self) -> bool:
        """Returns when the process has ended: whether all is in the cache."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        self._close_pipe()
        while self._pid is not None and not self._reap(os.WNOHANG):
            if time.monotonic() > deadline:
                self.close()
            time.sleep(_POLL_SECONDS)
        if self._succeeded:
            # Without the mark the next start compiles beside itself again, to no harm.
            with contextlib.suppress(OSError):
                self._mark.touch()
        else:
            _log.warning("compile_process_failed")
        return self._succeeded

    def close(self) -> None:
        """Ends the process if it has not ended."""
        self._close_pipe()
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._reap(0)

    def _reap(self, options: int) -> bool:
        if self._pid is None:
            return True
        pid, status = os.waitpid(self._pid, options)
        if pid == 0:
            return False
        self._pid = None
        self._succeeded = status == 0
        return True

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _run(self, parent: int, pipe: int) -> NoReturn:
        """The process itself. Ends without the interpreter's shutdown, whose exit handlers are the worker's."""
        status = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() == parent:
                gc.disable()  # what a compiler leaves behind ends with the process
                self._compile_all(lambda: _read_kinds(pipe))
                status = 0
        finally:
            os._exit(status)


def useful(folder: Path) -> bool:
    """Whether there is something to compile for a process of its own, and a processor that would else be idle."""
    return len(os.sched_getaffinity(0)) > 1 and not (folder / _COMPLETE).exists()


def compile_usual(head_kinds: Callable[[], Iterable[Kind]]) -> None:
    """What a worker on the CPU runs beside its layers: sampling, then the head.

    Args:
        head_kinds: returns when the model's files have been opened.
    """
    from kernels.backends.cpu_sampling import CpuSamplingOps
    from kernels.ops.linear_panels.cpu import Result, panel_linear

    CpuSamplingOps(1).compile()
    for kind in head_kinds():
        panel_linear(*kind, Result.FLOAT32)


def _read_kinds(pipe: int) -> list[Kind]:
    """Raises DecodeError where the worker has ended without a word."""
    with os.fdopen(pipe, "rb") as file:
        return msgspec.json.decode(file.read(), type=list[tuple[int, bool]])
