"""Endpoints and socket options of the ZeroMQ plane between gateway and workers.

Each worker binds one ROUTER at `ipc://RUNTIME_DIR/worker-{index}-{epoch}.sock`; a gateway holds one DEALER per
worker. The runtime directory has mode 0700, so only the user who runs Pelton can connect. The name carries the
worker's epoch: a restarted worker binds a new path, and a gateway never speaks to an earlier life by accident.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

import zmq

from shared import wire
from shared.errors import ConfigurationError

HIGH_WATER_MARK = 10_000
"""Messages queued per peer and direction; beyond it sends fail with zmq.Again instead of growing memory."""

MAX_ENDPOINT_PATH = 107
"""sockaddr_un.sun_path holds 108 bytes, the last of which is the terminator."""

_SOCKET_NAME = re.compile(r"worker-(\d{1,6})-([0-9a-f]{8})\.sock")


def runtime_dir(configured: str = "") -> Path:
    """The directory of the workers' sockets, made with mode 0700 where it is missing.

    Args:
        configured: the setting `runtime_dir`; empty takes $XDG_RUNTIME_DIR/pelton, else /tmp/pelton-UID.

    Raises:
        ConfigurationError: it cannot be made, is no directory, belongs to another user, is open to others or closed
            to its owner, or its path is too long for a socket's name.
    """
    path = Path(configured) if configured else _default_runtime_dir()
    path = path.absolute()
    longest = len(os.fsencode(path)) + len("/worker-999999-00000000.sock")
    if longest > MAX_ENDPOINT_PATH:
        raise ConfigurationError(
            f"runtime_dir {path} is too long: a socket's path there would have {longest} bytes, "
            f"at most {MAX_ENDPOINT_PATH} are possible"
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
    """The endpoint of one life of a worker. `epoch` is 8 lower-case hexadecimal characters."""
    name = f"worker-{index}-{epoch}.sock"
    if not _SOCKET_NAME.fullmatch(name):
        raise ConfigurationError(f"{name} is no socket name: index below 1000000, 8 hex digits of epoch")
    return f"ipc://{directory / name}"


def list_worker_endpoints(directory: Path) -> list[str]:
    """The endpoints of the sockets that lie in the directory now, oldest first; stale ones may be among them."""
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
    """(index, epoch) of an endpoint made by worker_endpoint, or None for any other."""
    match = _SOCKET_NAME.fullmatch(endpoint.rpartition("/")[2])
    return (int(match[1]), match[2]) if match else None


def remove_stale(directory: Path, index: int) -> list[str]:
    """Removes the sockets of all lives of worker `index`; called by that worker before it binds.

    One supervisor (or unit) runs one worker of an index at a time, so whatever lies there is of a dead one.
    Returns the names that were removed.
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
    """A worker's bound ROUTER. Sends to a peer that is gone raise ZMQError(EHOSTUNREACH), never drop silently.

    Raises ConfigurationError where the endpoint cannot be bound. Sends and receives take zmq.NOBLOCK.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        _set_common_options(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A gateway that restarts with the same identity takes over from its own dead connection.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigurationError(f"{endpoint} cannot be bound: {zmq.strerror(error.errno or 0)}") from error
    return socket


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    """A gateway's DEALER to one worker; `identity` is the gateway's id (1 to 255 bytes, the first not zero).

    Raises ConfigurationError for an endpoint that ZeroMQ cannot parse. Connecting itself goes on in the background.
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
        raise ConfigurationError(f"worker endpoint {endpoint} is not usable: {reason}") from error
    return socket


def _set_common_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IPV6, 0)
