"""systemd's notification protocol (sd_notify(3)): one datagram of KEY=VALUE lines to $NOTIFY_SOCKET.

Without that variable every function does nothing, so callers need not know whether systemd runs them.
"""

from __future__ import annotations

import contextlib
import os
import socket


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
