"""In-memory store of responses that clients may retrieve or continue.

A response is kept for a while after its last use. When the store is full, the key with the most data loses its least
recently used responses, so that a key with little data loses nothing to others.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import orjson

from gateway.stores.holdings import Holdings
from gateway.stores.ids import shown_id
from gateway.text.offload import run_in_thread_if_large
from shared.errors import InvalidRequestError, NotFoundError

_OVERHEAD = 1024
"""Approximate bytes of a response besides its texts."""
_PART_OVERHEAD = 192
"""Approximate bytes of a part of a conversation besides its text."""
_ITEM_OVERHEAD = 256
"""Approximate bytes of the id of an item."""
_BYTES_OF_OBJECT = 256
"""Approximate bytes of JSON that take as long to parse as one object of a conversation."""
_LOOK_UPS = 256


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """One response. Responses that continue one another share the texts of their conversation.

    The texts occupy exactly their length (see gateway.http.errors.cached_json), so that the counted size is the real
    one. All fields are strings and bytes, so that the garbage collector need not track the object: there may be a
    hundred thousand.

    Attributes:
        owner: Hash of the key that created it.
        body: The response as JSON.
        input: Input items as JSON arrays, first those of the responses that it continues.
        output: Its output items, a JSON array; empty while it runs.
        background: True if it runs without a connection.
        done: True if it will not change any more.
        item_ids: Ids of the last part of the input and of the output.
    """

    owner: bytes
    body: bytes
    input: tuple[bytes, ...]
    output: bytes = b"[]"
    background: bool = False
    done: bool = True
    item_ids: tuple[str, ...] = ()

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """Conversation that a continuing response starts with."""
        return (*self.input, self.output)

    @property
    def own_size(self) -> int:
        """Bytes without the parts of the conversation, which other responses may share."""
        items = sum(len(identifier) + _ITEM_OVERHEAD for identifier in self.item_ids)
        return _OVERHEAD + len(self.body) + 8 * len(self.input) + items

    @property
    def size(self) -> int:
        """Bytes of the response including its conversation."""
        return self.own_size + sum(map(_part_size, self.conversation))


def _part_size(part: bytes) -> int:
    return len(part) + _PART_OVERHEAD


class _KeyResponses:
    """Responses of one key.

    Attributes:
        responses: Responses by id, least recently used first.
        items: Id of the newest response that contains an item, by the item's id.
        sharers: Number of responses that contain a part of a conversation, by the identity of the part.
    """

    __slots__ = ("items", "responses", "sharers")

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, str] = {}
        self.sharers: dict[int, int] = {}

    def add(self, identifier: str, response: StoredResponse) -> int:
        """Add a response and return the bytes that it takes."""
        self.responses[identifier] = response
        self.items.update(dict.fromkeys(response.item_ids, identifier))
        size = response.own_size
        for part in response.conversation:
            sharers = self.sharers.get(id(part), 0)
            self.sharers[id(part)] = sharers + 1
            if not sharers:
                size += _part_size(part)
        return size

    def remove(self, identifier: str) -> int:
        """Remove a response and return the bytes that this frees."""
        response = self.responses.pop(identifier)
        for item in response.item_ids:
            if self.items.get(item) == identifier:
                del self.items[item]
        size = response.own_size
        for part in response.conversation:
            self.sharers[id(part)] -= 1
            if not self.sharers[id(part)]:
                del self.sharers[id(part)]
                size += _part_size(part)
        return size


class ResponseStore:
    """Responses of one gateway process.

    Args:
        max_bytes: Maximum size of all responses; 0 stores none.
        time_to_live: Seconds after its last use at which a response expires.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        time_to_live: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._time_to_live = time_to_live
        self._clock = clock
        self._shares: dict[bytes, _KeyResponses] = {}
        self._bytes = Holdings()
        # Owner and time of last use of each response, least recently used first.
        self._used: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        # Responses that were deleted while they ran, until they end.
        self._deleted: set[str] = set()

    @property
    def keeps(self) -> bool:
        """True if the store keeps responses at all."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses. Parts that several responses of a key share count once."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._used

    def put(self, identifier: str, response: StoredResponse) -> None:
        """Store a response and replace its earlier state.

        A response that is larger than the store, or that was deleted while it ran, is not stored. A response that was
        stored while it ran must be stored again when it is done.
        """
        if identifier in self._deleted:
            if response.done:
                self._deleted.discard(identifier)
            return
        self._remove(identifier)
        if response.size > self._max_bytes:
            return
        owner = response.owner
        self._bytes.add(owner, self._shares.setdefault(owner, _KeyResponses()).add(identifier, response))
        self._used[identifier] = owner, self._clock()
        while self._bytes.total > self._max_bytes:
            self._remove(next(iter(self._shares[self._bytes.largest()].responses)))
        self.expire()

    def get(self, identifier: str, owner: bytes) -> StoredResponse:
        """Return a response.

        Raises:
            NotFoundError: There is no such response, or it belongs to another key.
        """
        self.expire()
        share = self._shares.get(owner)
        if share is None or identifier not in share.responses:
            raise NotFoundError(f"There is no response with the id {shown_id(identifier)}.")
        self._used[identifier] = owner, self._clock()
        self._used.move_to_end(identifier)
        share.responses.move_to_end(identifier)
        return share.responses[identifier]

    def continued(self, identifier: str, owner: bytes) -> tuple[bytes, ...]:
        """Return the conversation that a continuing response starts with.

        Raises:
            NotFoundError: There is no such response for this key.
            InvalidRequestError: The response is still running.
        """
        stored = self.get(identifier, owner)
        if not stored.done:
            raise InvalidRequestError(
                "previous_response_id names a response that has not ended yet; wait for its end.",
                param="previous_response_id",
            )
        return stored.conversation

    def with_item(self, item_id: str, owner: bytes) -> StoredResponse:
        """Return the newest response that contains this item.

        Raises:
            NotFoundError: This key has no such item.
        """
        share = self._shares.get(owner)
        if share is None or item_id not in share.items:
            raise NotFoundError(f"There is no stored item with the id {shown_id(item_id)}.")
        return self.get(share.items[item_id], owner)

    def delete(self, identifier: str, owner: bytes) -> None:
        """Delete a response. Raises NotFoundError as `get` does."""
        if not self.get(identifier, owner).done:
            self._deleted.add(identifier)
        self._remove(identifier)

    def expire(self) -> None:
        """Remove expired responses."""
        oldest = self._clock() - self._time_to_live
        while self._used:
            identifier = next(iter(self._used))
            if self._used[identifier][1] > oldest:
                return
            self._remove(identifier)

    def _remove(self, identifier: str) -> None:
        if (found := self._used.pop(identifier, None)) is None:
            return
        owner, _ = found
        share = self._shares[owner]
        self._bytes.add(owner, -share.remove(identifier))
        if not share.responses:
            del self._shares[owner]


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
