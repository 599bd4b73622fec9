"""Items of stored responses, loaded from the JSON that they are kept as."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from gateway.stores.responses import ResponseStore, StoredResponse
from shared.errors import NotFoundError

_LOAD_IN_THREAD_ABOVE = 262_144
_LOOK_UPS = 256


async def load_items(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """The items of JSON arrays; in a thread where they are many."""
    if sum(map(len, parts)) > _LOAD_IN_THREAD_ABOVE:
        return await asyncio.to_thread(_load, parts)
    return _load(parts)


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
        for item in await load_items([*stored.input[-1:], stored.output]):
            if item["id"] in identifiers:
                found[item["id"]] = item
    return found


def _load(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for part in parts for item in orjson.loads(part)]
