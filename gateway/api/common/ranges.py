"""Ranges of numbers that a client sends."""

from __future__ import annotations

from shared.errors import InvalidRequestError

MAX_INT32 = 2**31 - 1


def check_range(name: str, value: int, low: int, high: int) -> int:
    """The value. Raises InvalidRequestError, with the range, where it is outside."""
    if not low <= value <= high:
        shown = str(value) if abs(value) < 2**63 else "a number beyond 64 bits"
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {shown}.", param=name)
    return value
