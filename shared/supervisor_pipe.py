"""Between a supervisor and its children: the pipe by which a child learns that the supervisor is gone, however that
ended, and the message by which the supervisor learns why a child cannot go on.

The supervisor holds the write end and never writes; the child inherits the read end, named by PELTON_SUPERVISOR_FD.
When the supervisor dies (kill -9 included) the kernel closes the write end and the child reads end-of-file.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from shared import notify

ENVIRONMENT_VARIABLE = "PELTON_SUPERVISOR_FD"
REASON_PREFIX = "X_PELTON_REASON="
"""Begins the line of a notification that says why a child ends; systemd ignores what begins with X_."""


def supervisor_fd() -> int | None:
    """The inherited read end, or None where no supervisor started this process. The caller may add it to its loop."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not text.isdecimal():
        return None
    fd = int(text)
    try:
        os.set_inheritable(fd, False)
    except OSError:
        return None
    return fd


def watch(callback: Callable[[], None]) -> threading.Thread | None:
    """Calls `callback` once, from a daemon thread, when the supervisor is gone.

    A callback for an event loop hands over with `loop.call_soon_threadsafe`. Returns None, and never calls, where no
    supervisor started this process.
    """
    fd = supervisor_fd()
    if fd is None:
        return None
    thread = threading.Thread(target=_wait_for_end, args=(fd, callback), name="supervisor-pipe", daemon=True)
    thread.start()
    return thread


def give_reason(program: str, reason: str) -> None:
    """Says why this process is about to end: to its supervisor, whose last line it shall be, else on standard error."""
    told = ENVIRONMENT_VARIABLE in os.environ and notify.notify(**{REASON_PREFIX[:-1]: reason})
    if not told:
        print(f"{program}: {reason}", file=sys.stderr)


def _wait_for_end(fd: int, callback: Callable[[], None]) -> None:
    try:
        while os.read(fd, 64):
            continue
    except OSError:
        pass
    callback()
