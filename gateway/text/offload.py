"""Work on what a client sent: in a thread where there is so much of it that the event loop would stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

MANY = 100
"""Objects of a conversation: looking at so many takes about a millisecond, a tenth of that is what a thread costs."""
_CHARACTERS = 4096
"""Of a string, which take as long as an object."""

_T = TypeVar("_T")


async def aside(num_objects: int, work: Callable[[], _T]) -> _T:
    """What `work` returns or raises.

    Args:
        num_objects: that it looks at, about.
    """
    return await asyncio.to_thread(work) if num_objects > MANY else work()


def count_objects(values: Iterable[Mapping[str, Any]]) -> int:
    """Messages or items, with the objects in them and what their strings weigh; counts no further than MANY."""
    count = 0
    left: list[Any] = list(values)
    while left and count <= MANY:
        value = left.pop()
        if isinstance(value, str):
            # A call's arguments are JSON, to be parsed.
            count += len(value) // _CHARACTERS
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, Mapping):
            count += 1
            left.extend(value.values())
    return count
