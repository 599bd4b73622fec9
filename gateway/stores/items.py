"""Loading of stored response items from JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from gateway.stores.responses import ResponseStore, StoredResponse
from gateway.text.offload import run_in_thread_if_large
from shared.errors import NotFoundError

_BYTES_OF_OBJECT = 256
"""Approximate bytes of JSON that take as long to parse as one object of a conversation."""
_LOOK_UPS = 256


def load_items(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the items of JSON arrays."""
    return [item for part in parts for item in orjson.loads(part)]


def count_stored(parts: Sequence[bytes]) -> int:
    """Estimate the number of objects from the length of the JSON; for gateway.text.offload."""
    return sum(map(len, parts)) // _BYTES_OF_OBJECT


async def find_items(store: ResponseStore, wanted: Iterable[str], owner: bytes) -> dict[str, dict[str, Any]]:
    """Return the wanted items that the store has for this key, by id.

    An item has the state that it has in the newest response that contains it.
    """
    holders: dict[int, tuple[StoredResponse, set[str]]] = {}
    for index, identifier in enumerate(wanted):
        if index % _LOOK_UPS == _LOOK_UPS - 1:
            await asyncio.sleep(0)  # thousands of items take a while: yield to other tasks
        with suppress(NotFoundError):
            stored = store.with_item(identifier, owner)
            holders.setdefault(id(stored), (stored, set()))[1].add(identifier)
    found: dict[str, dict[str, Any]] = {}
    for stored, identifiers in holders.values():
        await asyncio.sleep(0)
        # Keep only the wanted items, because there may be many others.
        parts = [*stored.input[-1:], stored.output]
        for item in await run_in_thread_if_large(count_stored(parts), partial(load_items, parts)):
            if item["id"] in identifiers:
                found[item["id"]] = item
    return found
