"""Communication of a process with the supervisor that started it: systemd, or `pelton serve`.

Both receive sd_notify(3) messages: one datagram of KEY=VALUE lines to $NOTIFY_SOCKET. Without that variable nothing is
sent, so callers need not know what runs them.

The pipe tells a child of `pelton serve` that the supervisor has ended, however that happened. The supervisor holds the
write end and never writes; the child inherits the read end, named by PELTON_SUPERVISOR_FD. When the supervisor dies
(also by kill -9), the kernel closes the write end and the child reads end-of-file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable

SUPERVISOR_FD_VARIABLE = "PELTON_SUPERVISOR_FD"
REASON_PREFIX = "X_PELTON_REASON="
"""Prefix of a notification that contains the reason of a child's end. systemd ignores lines that begin with X_."""


def notify(**fields: str | int) -> bool:
    """Send a notification, e.g.

    `notify(READY=1, STATUS="serving")`. Return True if it was sent; never raises or blocks.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address[0] == "@":
        address = "\0" + address[1:]
    # A line break inside a value would start another assignment.
    lines = (f"{key}={str(value).replace(chr(10), ' ')}" for key, value in fields.items())
    payload = "\n".join(lines).encode("utf-8", "replace")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(payload, address)
        return True
    return False


def ready(status: str) -> bool:
    """Report that the service is ready."""
    return notify(READY=1, STATUS=status)


def stopping(status: str) -> bool:
    """Report that the service has begun to stop."""
    return notify(STOPPING=1, STATUS=status)


def extend_timeout(seconds: float, status: str) -> bool:
    """Request more time to start or stop; repeat it while a model loads."""
    return notify(EXTEND_TIMEOUT_USEC=int(seconds * 1e6), STATUS=status)


def watchdog() -> bool:
    """Report that the caller's main loop is alive. Call it from that loop, never from another thread."""
    return notify(WATCHDOG=1)


def watchdog_interval() -> float | None:
    """Return the seconds between two calls of watchdog(): half of systemd's limit for this process.

    None without a watchdog.
    """
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    owner = os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or int(microseconds) == 0 or (owner and owner != str(os.getpid())):
        return None
    return int(microseconds) / 2e6


def supervisor_fd() -> int | None:
    """Return the inherited read end, or None if no supervisor started this process.

    The caller may add it to its event loop.
    """
    text = os.environ.get(SUPERVISOR_FD_VARIABLE, "")
    if not text.isdecimal():
        return None
    fd = int(text)
    try:
        os.set_inheritable(fd, False)
    except OSError:
        return None
    return fd


def watch_supervisor(callback: Callable[[], None]) -> threading.Thread | None:
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
    was_sent = SUPERVISOR_FD_VARIABLE in os.environ and notify(**{REASON_PREFIX[:-1]: reason})
    if not was_sent:
        print(f"{program}: {reason}", file=sys.stderr)


def _wait_for_end(fd: int, callback: Callable[[], None]) -> None:
    try:
        while os.read(fd, 64):
            continue
    except OSError:
        pass
    callback()
