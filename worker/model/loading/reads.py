"""Reading of model files into memory of our own; nothing is mapped."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ModelFileError


def open_for_reading(path: Path) -> tuple[int, int]:
    """Open a regular file and return its descriptor and size. Raises ModelFileError if that fails."""
    try:
        # Without O_NONBLOCK, opening a FIFO of that name would block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be opened: {error.strerror}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise ModelFileError(f"{path.name}: is not a regular file")
    return fd, status.st_size


def pread_exactly(fd: int, offset: int, count: int, name: str) -> npt.NDArray[np.uint8]:
    """Return `count` bytes from `offset` in memory of our own. Raises ModelFileError if the file ends before."""
    out = np.empty(count, dtype=np.uint8)
    view = memoryview(out)  # type: ignore[arg-type]
    done = 0
    while done < count:
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise ModelFileError(f"{name}: cannot be read: {error.strerror}") from None
        if got == 0:
            raise ModelFileError(f"{name}: ends at byte {offset + done}, before byte {offset + count}; did it shrink?")
        done += got
    return out


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the contents of a file of at most `limit` bytes."""
    fd, size = open_for_reading(path)
    try:
        if size > limit:
            raise ModelFileError(f"{path.name}: has {size} bytes; at most {limit} are allowed")
        return pread_exactly(fd, 0, size, path.name).tobytes()
    finally:
        os.close(fd)


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object. A key that appears twice at one level is an error."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ModelFileError(f"{where}: the key {key[:200]!r} appears twice")
                seen.add(key)
        return result

    try:
        value = json.loads(raw, object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: is not valid JSON ({str(error)[:120]})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: is not a JSON object")
    return value


def read_json_object(path: Path, limit: int = 1 << 24) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return parse_object(read_bounded(path, limit), path.name)
