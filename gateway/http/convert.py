"""Conversion of untyped JSON values to msgspec structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from shared.errors import InvalidRequestError

Struct = TypeVar("Struct", bound=msgspec.Struct)

_MAX_SHOWN = 64
# The forms of msgspec's messages.
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_VALUE = re.compile(r"^Invalid (?:enum )?value (?P<value>.*)$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")


def convert(value: object, kind: type[Struct], place: str = "") -> Struct:
    """Convert a JSON value to a struct without coercion: a bool is not an int, and "2" is not 2.

    Args:
        value: The parsed JSON value.
        kind: The struct to convert it to.
        place: Path of the value in the request body; empty for the body itself.

    Raises:
        InvalidRequestError: The value does not fit the struct; the error names the first field at fault.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), place) from None


def _invalid_field(text: str, place: str) -> InvalidRequestError:
    """Translate a message of msgspec about a value at `place`."""
    at = _PATH.search(text)
    path = _joined(place, at["path"] if at else "")
    problem = text[: at.start()] if at else text
    for pattern, code, words in (
        (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
    ):
        if found := pattern.match(problem):
            name = _joined(path, found["name"])
            return InvalidRequestError(f"{words}: {name}.", param=name, code=code)
    if found := _VALUE.match(problem):
        message = f"Invalid value for {path}: {found['value'][:_MAX_SHOWN]}."
        return InvalidRequestError(message, param=path, code="invalid_value")
    for old, new in (("`", ""), (" | null", ""), ("NoneType", "null"), ("Expected", "expected")):
        problem = problem.replace(old, new)
    return InvalidRequestError(f"Invalid type for {path}: {problem}.", param=path, code="invalid_type")


def _joined(place: str, path: str) -> str:
    return f"{place}.{path}" if place and path and not path.startswith("[") else place + path
