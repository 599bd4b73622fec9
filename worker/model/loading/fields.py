"""Bounded reading of model files into memory of our own, and typed access to their configuration values."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ModelFileError

_REQUIRED = object()


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


class Fields:
    """Reader of one mapping (config.json, a part of it, or GGUF metadata).

    Args:
        values: The mapping; null counts as absent.
        where: Prefix of the key in errors, such as `config.json: `.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """Return the value unchanged, or None."""
        return self._values.get(key)

    def error(self, key: str, what: str) -> ModelFileError:
        """Return an error that names the key."""
        return ModelFileError(readable(f"{self.where}{key} {what}", 500))

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(key, "is missing")
            return default
        return value

    def integer(self, key: str, default: Any = _REQUIRED, *, low: int = 0, high: int = 1 << 31) -> int:
        """Return an integer with low <= value <= high. An array counts if all its entries are equal."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {shown(value)}; an integer is needed")
        if value is not default and not low <= value <= high:
            raise self.error(key, f"is {value}; {low} to {high} is allowed")
        return value

    def optional_integer(self, key: str, *, low: int = 0, high: int = 1 << 31) -> int | None:
        """Return an integer as `integer` does, or None if absent."""
        return self.integer(key, low=low, high=high) if key in self else None

    def number(self, key: str, default: Any = _REQUIRED, *, low: float = 0.0, high: float = 1e18) -> float:
        """Return a finite number with low < value <= high."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"is {shown(value)}; a finite number is needed")
        if value is not default and not low < value <= high:
            raise self.error(key, f"is {value}; more than {low} and at most {high} is allowed")
        return float(value)

    def optional_number(self, key: str, *, low: float = 0.0, high: float = 1e18) -> float | None:
        """Return a number as `number` does, or None if absent."""
        return self.number(key, low=low, high=high) if key in self else None

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        """Return a boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}; true or false is needed")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {shown(value)}; a string is needed")
        return value

    def choice(self, key: str, supported: Iterable[str], default: Any = _REQUIRED) -> str:
        """Return one of the supported strings."""
        value = self.text(key, default)
        names = list(supported)
        if value not in names:
            raise self.error(key, f"is {value[:80]!r}; supported {'are' if names[1:] else 'is'} {', '.join(names)}")
        return value

    def part(self, key: str) -> Fields:
        """Return a mapping inside this one; empty if absent."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {shown(value)}; an object is needed")
        return Fields(value, f"{self.where}{key}.")


def readable(text: str, limit: int = 300) -> str:
    """Make text from a file safe for terminals and logs: escape control characters and cut to `limit`."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def shown(value: object) -> str:
    """Return a value for an error message, cut to a readable length."""
    text = f"an array of {value.size}" if isinstance(value, np.ndarray) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
