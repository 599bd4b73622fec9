"""OpenAI's `prompt_cache_breakpoint` of a part of text: checked, and without effect, since every prefix is cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidRequestError

BREAKPOINT = "prompt_cache_breakpoint"
"""The field's name."""
_VALUES: Mapping[str, tuple[str | None, ...]] = {"mode": ("explicit",), "ttl": (None, "30m", "12h")}


def check_breakpoint(part: Mapping[str, Any], place: str) -> None:
    """Looks at the field of the part that stands at `place`; null counts as absent. Raises InvalidRequestError."""
    value, place = part.get(BREAKPOINT), f"{place}.{BREAKPOINT}"
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{place} must be an object.", param=place, code="invalid_type")
    for name in value:
        if name not in _VALUES:
            shown = f"{place}.{name[:64]}"
            raise InvalidRequestError(f"Unknown parameter: {shown}.", param=shown, code="unknown_parameter")
    for name, known in _VALUES.items():
        if value.get(name) not in known:
            allowed = " or ".join(one for one in known if one)
            raise InvalidRequestError(f"{place}.{name} must be {allowed}.", param=f"{place}.{name}")
