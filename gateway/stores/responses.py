"""Responses that clients may ask for again, in memory: least recently used go first, and none is kept for ever."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.errors import InvalidRequestError, NotFoundError

MAX_RESPONSES = 100_000
_OVERHEAD = 1024
"""Bytes that a response takes beside its texts, about."""
_PART_OVERHEAD = 192
"""Bytes that a part of a conversation takes beside its text, about."""
_ITEM_OVERHEAD = 256
"""Bytes that the id of an item takes, about."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. Texts of a conversation are shared by those that continue it.

    Attributes:
        owner: hash of the key that made it.
        body: the response as it is sent, JSON.
        input: what was put in, JSON arrays of items; first those of the responses that it continues.
        output: its own items, a JSON array; empty while it runs.
        background: it was made to run without a connection.
        done: it will not change any more.
        item_ids: of the last part of the input, and of the output.
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
        """What a response that continues this one begins with."""
        return (*self.input, self.output)

    @property
    def own_size(self) -> int:
        """Bytes beside the parts of its conversation, which others may share."""
        items = sum(len(identifier) + _ITEM_OVERHEAD for identifier in self.item_ids)
        return _OVERHEAD + len(self.body) + 8 * len(self.input) + items

    @property
    def size(self) -> int:
        """Bytes of all that it has."""
        return self.own_size + sum(map(_part_size, self.conversation))


def _part_size(part: bytes) -> int:
    return len(part) + _PART_OVERHEAD


def _trimmed(response: StoredResponse) -> StoredResponse:
    """The same in as many bytes as it says: what orjson makes keeps the buffer that it was written to, of up to sixteen
    times its length. What it continues is shared with a stored one, and trimmed.
    """
    *continued, own = response.input
    return replace(
        response,
        body=bytes(memoryview(response.body)),
        output=bytes(memoryview(response.output)),
        input=(*continued, bytes(memoryview(own))),
    )


class ResponseStore:
    """The responses of one gateway process.

    Args:
        max_bytes: of all responses; 0 keeps none.
        time_to_live: seconds after its last use that one is forgotten.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        time_to_live: float,
        max_responses: int = MAX_RESPONSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._time_to_live = time_to_live
        self._clock = clock
        # Least recently used first, each with the time of its last use.
        self._responses: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        # Which response has an item: by owner and id, since clients may choose ids.
        self._items: dict[tuple[bytes, str], str] = {}
        # Those that were deleted while they ran, until they end.
        self._deleted: set[str] = set()
        # How many responses have a part of a conversation, by its id: those that continue one another have the same.
        self._sharers: dict[int, int] = {}
        self.num_bytes = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._responses

    def put(self, identifier: str, response: StoredResponse) -> None:
        """Keeps a response, in the place of an earlier state of it; not one that is larger than all room, nor one that
        was deleted while it ran. One that was put before it was done must be put when it is.
        """
        if identifier in self._deleted:
            if response.done:
                self._deleted.discard(identifier)
            return
        self._remove(identifier)
        if response.size > self._max_bytes:
            return
        response = _trimmed(response)
        self._responses[identifier] = response, self._clock()
        self._count(response)
        self._items.update(dict.fromkeys(((response.owner, item) for item in response.item_ids), identifier))
        while self.num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            self._remove(next(iter(self._responses)))
        self.expire()

    def get(self, identifier: str, owner: bytes) -> StoredResponse:
        """Raises NotFoundError, also for a response of another key."""
        self.expire()
        found = self._responses.get(identifier)
        if found is None or found[0].owner != owner:
            raise NotFoundError("There is no response with that id.")
        self._responses[identifier] = found[0], self._clock()
        self._responses.move_to_end(identifier)
        return found[0]

    def continued(self, identifier: str, owner: bytes) -> tuple[bytes, ...]:
        """What a response that continues this one begins with. Raises NotFoundError, InvalidRequestError if it runs."""
        stored = self.get(identifier, owner)
        if not stored.done:
            raise InvalidRequestError("The response has not ended yet.", param="previous_response_id")
        return stored.conversation

    def with_item(self, item_id: str, owner: bytes) -> StoredResponse:
        """The newest response that has this among its own items. Raises NotFoundError as `get` does."""
        return self.get(self._items.get((owner, item_id), ""), owner)

    def delete(self, identifier: str, owner: bytes) -> None:
        """Raises NotFoundError as `get` does."""
        if not self.get(identifier, owner).done:
            self._deleted.add(identifier)
        self._remove(identifier)

    def expire(self) -> None:
        """Forgets those whose time is over."""
        oldest = self._clock() - self._time_to_live
        while self._responses:
            identifier = next(iter(self._responses))
            if self._responses[identifier][1] > oldest:
                return
            self._remove(identifier)

    def _remove(self, identifier: str) -> None:
        if (found := self._responses.pop(identifier, None)) is not None:
            response, _ = found
            self._discount(response)
            for item in response.item_ids:
                if self._items.get((response.owner, item)) == identifier:
                    del self._items[response.owner, item]

    def _count(self, response: StoredResponse) -> None:
        self.num_bytes += response.own_size
        for part in response.conversation:
            sharers = self._sharers.get(id(part), 0)
            self._sharers[id(part)] = sharers + 1
            if not sharers:
                self.num_bytes += _part_size(part)

    def _discount(self, response: StoredResponse) -> None:
        self.num_bytes -= response.own_size
        for part in response.conversation:
            self._sharers[id(part)] -= 1
            if not self._sharers[id(part)]:
                del self._sharers[id(part)]
                self.num_bytes -= _part_size(part)
