"""Endpoints and socket options of the ZeroMQ connections between gateway and workers.

Each worker binds one ROUTER at `ipc://RUNTIME_DIR/worker-{index}-{epoch}.sock`. A gateway has one DEALER per worker.
The runtime directory has mode 0700, so only the user who runs Pelton can connect. The name contains the worker's
epoch: a restarted worker binds a new path, and a gateway never talks to an earlier process by accident.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

import zmq

from shared.errors import ConfigurationError
from shared.messages import MAX_MESSAGE_BYTES

HIGH_WATER_MARK = 10_000
"""Messages queued per peer and direction. Above it, sends fail with zmq.Again and memory does not grow."""

MAX_ENDPOINT_PATH = 107
"""sockaddr_un.sun_path has 108 bytes, the last of which is the terminator."""

_SOCKET_NAME = re.compile(r"worker-(\d{1,6})-([0-9a-f]{8})\.sock")


def runtime_dir(configured: str = "") -> Path:
    """Return the directory of the workers' sockets, created with mode 0700 if it is missing.

    Args:
        configured: The setting `runtime_dir`; empty for $XDG_RUNTIME_DIR/pelton, else /tmp/pelton-UID.

    Raises:
        ConfigurationError: It cannot be created, is not a directory, belongs to another user, has other
            permissions, or its path is too long for a socket.
    """
    path = Path(configured) if configured else _default_runtime_dir()
    path = path.absolute()
    longest = len(os.fsencode(path)) + len("/worker-999999-00000000.sock")
    if longest > MAX_ENDPOINT_PATH:
        raise ConfigurationError(
            f"runtime_dir {path} is too long: a socket's path there would have {longest} bytes; at most "
            f"{MAX_ENDPOINT_PATH} are allowed"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # lstat: a symbolic link that another user left in /tmp must not redirect us.
        status = path.lstat()
    except OSError as error:
        raise ConfigurationError(f"runtime_dir {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"runtime_dir {path} is not a directory")
    if status.st_uid != os.getuid():
        raise ConfigurationError(f"runtime_dir {path} belongs to user {status.st_uid}, not to {os.getuid()}")
    if status.st_mode & 0o777 != 0o700:
        raise ConfigurationError(
            f"runtime_dir {path} has mode {stat.S_IMODE(status.st_mode):04o}; "
            "it must be 0700, open to its owner and closed to other users"
        )
    return path


def _default_runtime_dir() -> Path:
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    return Path(xdg) / "pelton" if xdg else Path(f"/tmp/pelton-{os.getuid()}")


def worker_endpoint(directory: Path, index: int, epoch: str) -> str:
    """Return the endpoint of one process of a worker. `epoch` has 8 lower-case hexadecimal characters."""
    name = f"worker-{index}-{epoch}.sock"
    if not _SOCKET_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name} is not a socket name: expected an index below 1000000 and an epoch of 8 hexadecimal digits"
        )
    return f"ipc://{directory / name}"


def list_worker_endpoints(directory: Path) -> list[str]:
    """Return the endpoints of the sockets in the directory, oldest first. Stale ones may be included."""
    found: list[tuple[int, str]] = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            if _SOCKET_NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISSOCK(status.st_mode):
                        found.append((status.st_mtime_ns, f"ipc://{entry.path}"))
    return [endpoint for _, endpoint in sorted(found)]


def parse_endpoint(endpoint: str) -> tuple[int, str] | None:
    """Return (index, epoch) of an endpoint made by worker_endpoint, or None for any other."""
    match = _SOCKET_NAME.fullmatch(endpoint.rpartition("/")[2])
    return (int(match[1]), match[2]) if match else None


def remove_stale(directory: Path, index: int) -> list[str]:
    """Remove the sockets of all earlier processes of worker `index`, which calls this before it binds.

    One supervisor or unit runs one worker of an index at a time, so existing sockets belong to dead processes.

    Returns:
        The names that were removed.
    """
    removed = []
    for endpoint in list_worker_endpoints(directory):
        parsed = parse_endpoint(endpoint)
        if parsed is not None and parsed[0] == index:
            path = Path(endpoint.removeprefix("ipc://"))
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(path.name)
    return removed


def make_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return a worker's bound ROUTER. Sends to a peer that is gone raise ZMQError(EHOSTUNREACH).

    Sends and receives take zmq.NOBLOCK.

    Raises:
        ConfigurationError: The endpoint cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        _set_common_options(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A gateway that restarts with the same identity replaces its own dead connection.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigurationError(f"{endpoint} cannot be bound: {zmq.strerror(error.errno or 0)}") from error
    return socket


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    """Return a gateway's DEALER to one worker. Connecting continues in the background.

    Args:
        context: ZeroMQ context.
        endpoint: Endpoint of the worker.
        identity: Id of the gateway, 1 to 255 bytes, the first not zero.

    Raises:
        ConfigurationError: ZeroMQ cannot parse the endpoint.
    """
    socket = context.socket(zmq.DEALER)
    try:
        _set_common_options(socket)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        reason = zmq.strerror(error.errno or 0)
        raise ConfigurationError(f"worker endpoint {endpoint} cannot be used: {reason}") from error
    return socket


def _set_common_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IPV6, 0)
