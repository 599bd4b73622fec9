"""Work on what a client sent: in a thread where there is so much of it that the event loop would stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

MANY = 100
"""Objects of a conversation: looking at so many takes about a millisecond, a tenth of that is what a thread costs."""

_T = TypeVar("_T")


async def aside(num_objects: int, work: Callable[[], _T]) -> _T:
    """What `work` returns or raises.

    Args:
        num_objects: that it looks at, about.
    """
    return await asyncio.to_thread(work) if num_objects > MANY else work()


def count_objects(values: Iterable[Mapping[str, Any]]) -> int:
    """Messages or items, with the parts and calls in them."""
    count = 0
    for value in values:
        count += 1
        for part in value.values():
            if isinstance(part, list):
                count += len(part)
    return count
