"""Items of stored responses, loaded from the JSON that they are kept as."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from gateway.stores.responses import ResponseStore, StoredResponse
from gateway.text.offload import aside
from shared.errors import NotFoundError

_BYTES_OF_OBJECT = 256
"""Bytes of JSON that take as long as an object of a conversation, about."""
_LOOK_UPS = 256


def load_items(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """The items of JSON arrays."""
    return [item for part in parts for item in orjson.loads(part)]


def count_stored(parts: Sequence[bytes]) -> int:
    """How many objects they are, about, by their length; for gateway.text.offload."""
    return sum(map(len, parts)) // _BYTES_OF_OBJECT


async def find_items(store: ResponseStore, wanted: Iterable[str], owner: bytes) -> dict[str, dict[str, Any]]:
    """Those of the items that this store has for this key, by their ids; each as the newest response with it has it."""
    holders: dict[int, tuple[StoredResponse, set[str]]] = {}
    for index, identifier in enumerate(wanted):
        if index % _LOOK_UPS == _LOOK_UPS - 1:
            await asyncio.sleep(0)  # thousands of them take a while: others have their turn
        with suppress(NotFoundError):
            stored = store.with_item(identifier, owner)
            holders.setdefault(id(stored), (stored, set()))[1].add(identifier)
    found: dict[str, dict[str, Any]] = {}
    for stored, identifiers in holders.values():
        await asyncio.sleep(0)
        # Of the others, which may be many, nothing is held.
        parts = [*stored.input[-1:], stored.output]
        for item in await aside(count_stored(parts), partial(load_items, parts)):
            if item["id"] in identifiers:
                found[item["id"]] = item
    return found
