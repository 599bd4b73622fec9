"""JSON that comes as text inside of a body, held to what a body is held to."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import InvalidRequestError
from shared.messages import MAX_GRAMMAR

MAX_DEPTH = 128
"""Objects and arrays inside each other. What walks a value (templates, schemas) takes some calls for each, and Python
allows a thousand."""


def parsed_json(text: str, place: str) -> Any:
    """The value of a schema or a structural tag that was sent as text.

    Args:
        place: the request field that holds it.

    Raises:
        InvalidRequestError: it is no JSON (nor are halves of surrogate pairs and numbers beyond all bounds), too long,
            or nested too deep.
    """
    if len(text) > MAX_GRAMMAR:
        raise _error(place, f"has {len(text)} characters; at most {MAX_GRAMMAR} are possible")
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        raise _error(place, "is not JSON") from None
    if is_too_deep(value):
        raise _error(place, f"is nested deeper than {MAX_DEPTH} objects and arrays")
    return value


def is_too_deep(value: object) -> bool:
    """Whether a JSON value has more than MAX_DEPTH objects and arrays inside each other."""
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
