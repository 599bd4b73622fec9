"""Execution of work on client data: in a thread if there is so much of it that the event loop would block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

MANY = 100
"""Number of objects of a conversation above which work runs in a thread.

Visiting so many takes about a millisecond; a thread costs a tenth of that.
"""
_CHARACTERS = 4096
"""Characters of a string that take as long as one object."""

_T = TypeVar("_T")


async def run_in_thread_if_large(num_objects: int, work: Callable[[], _T]) -> _T:
    """Return the result of `work`, and run it in a thread if it visits many objects.

    Args:
        num_objects: Approximate number of objects that it visits.
        work: Function without arguments.
    """
    return await asyncio.to_thread(work) if num_objects > MANY else work()


def count_objects(values: Iterable[Mapping[str, Any]]) -> int:
    """Count messages or items, the objects in them and the weight of their strings, up to MANY."""
    count = 0
    left: list[Any] = list(values)
    while left and count <= MANY:
        value = left.pop()
        if isinstance(value, str):
            # The arguments of a call are JSON that will be parsed.
            count += len(value) // _CHARACTERS
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, Mapping):
            count += 1
            left.extend(value.values())
    return count
