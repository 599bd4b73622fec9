"""Resolution of the flags that select a format: `auto`, `none`, or the name of a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from shared.errors import ConfigurationError

AUTO = "auto"
NONE = "none"

Format = TypeVar("Format")


def chosen_format(
    flag: str, name: str, formats: Mapping[str, Format], detect: Callable[[], Format | None]
) -> Format | None:
    """Return the format that a flag selects; `detect` finds the model's own.

    Raises:
        ConfigurationError: The flag has an unknown name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        return detect()
    form = formats.get(name.replace("-", "_").lower())
    if form is None:
        known = ", ".join((AUTO, NONE, *sorted(formats)))
        raise ConfigurationError(f"{flag} is {name[:64]!r}; known are {known}")
    return form
