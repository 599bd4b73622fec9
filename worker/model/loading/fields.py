"""Typed access to configuration values with ranges.

A missing or invalid value gives an error that names file and key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.errors import ModelFileError

_REQUIRED = object()


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
