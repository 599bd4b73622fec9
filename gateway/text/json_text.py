"""JSON that arrives as text inside a body, under the same limits as a body."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import InvalidRequestError
from shared.messages import MAX_GRAMMAR

MAX_DEPTH = 128
"""Maximum nesting of objects and arrays.

Code that walks a value (templates, schemas) uses several calls per level, and Python allows a thousand.
"""


def parsed_json(text: str, place: str) -> Any:
    """Parse a schema or a structural tag that was sent as text.

    Args:
        text: JSON text.
        place: Request field that contains it.

    Raises:
        InvalidRequestError: The text is not JSON (lone surrogates and infinite numbers are not), too long, or
            nested too deeply.
    """
    if len(text) > MAX_GRAMMAR:
        raise _error(place, f"has {len(text)} characters; at most {MAX_GRAMMAR} are allowed")
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        raise _error(place, "is not JSON") from None
    if is_too_deep(value):
        raise _error(place, f"is nested deeper than {MAX_DEPTH} objects and arrays")
    return value


def is_too_deep(value: object) -> bool:
    """Return True if a JSON value is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _error(place: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {what}.", param=place)
