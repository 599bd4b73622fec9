"""Items of stored responses, loaded from the JSON that they are kept as."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from gateway.stores.responses import ResponseStore
from shared.errors import NotFoundError

_LOAD_IN_THREAD_ABOVE = 262_144


async def load_items(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """The items of JSON arrays; in a thread where they are many."""
    if sum(map(len, parts)) > _LOAD_IN_THREAD_ABOVE:
        return await asyncio.to_thread(_load, parts)
    return _load(parts)


async def find_items(store: ResponseStore, wanted: Iterable[str], owner: bytes) -> dict[str, dict[str, Any]]:
    """Those of the items that this store has for this key, by their ids."""
    wanted = list(wanted)
    found: dict[str, dict[str, Any]] = {}
    for identifier in wanted:
        if identifier not in found:
            await asyncio.sleep(0)  # thousands of them take a while: others have their turn
            try:
                stored = store.with_item(identifier, owner)
            except NotFoundError:
                continue
            found |= {item["id"]: item for item in await load_items([*stored.input[-1:], stored.output])}
    return {identifier: found[identifier] for identifier in wanted if identifier in found}


def _load(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for part in parts for item in orjson.loads(part)]
