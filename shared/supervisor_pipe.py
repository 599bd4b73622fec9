"""Pipe and messages between a supervisor and its children.

By the pipe a child notices that the supervisor has ended, however that happened. The supervisor holds the write end
and never writes; the child inherits the read end, named by PELTON_SUPERVISOR_FD. When the supervisor dies (also by
kill -9), the kernel closes the write end and the child reads end-of-file. By a message a child tells its supervisor
why it cannot continue.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from shared import notify

ENVIRONMENT_VARIABLE = "PELTON_SUPERVISOR_FD"
REASON_PREFIX = "X_PELTON_REASON="
"""Prefix of a notification that contains the reason of a child's end. systemd ignores lines that begin with X_."""


def supervisor_fd() -> int | None:
    """Return the inherited read end, or None if no supervisor started this process.

    The caller may add it to its event loop.
    """
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
    """Call `callback` once, from a daemon thread, when the supervisor is gone.

    For an event loop, the callback uses `loop.call_soon_threadsafe`. Without a supervisor it is never called.
    """
    fd = supervisor_fd()
    if fd is None:
        return None
    thread = threading.Thread(target=_wait_for_end, args=(fd, callback), name="supervisor-pipe", daemon=True)
    thread.start()
    return thread


def give_reason(program: str, reason: str) -> None:
    """Report why this process is about to end, to its supervisor if there is one, else on standard error."""
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
