"""Responses that clients may ask for again, in memory, for a while after their last use.

Where room is needed, the key that has most of it loses its least recently used ones: who stores little loses nothing to
one who stores much.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from gateway.stores.holdings import Holdings
from gateway.stores.ids import shown_id
from shared.errors import InvalidRequestError, NotFoundError

MAX_RESPONSES = 100_000
_OVERHEAD = 1024
"""Bytes that a response takes beside its texts, about."""
_PART_OVERHEAD = 192
"""Bytes that a part of a conversation takes beside its text, about."""
_ITEM_OVERHEAD = 256
"""Bytes that the id of an item takes, about."""


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """One response. Texts of a conversation are shared by those that continue it. None of them may have more room than
    its length says, so that what is counted is what is taken: see gateway.http.errors.kept_json.

    It holds nothing but texts, so that the garbage collector need not look at it: there may be a hundred thousand.

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


class _Share:
    """What one key has.

    Attributes:
        responses: least recently used first.
        items: which of the responses has an item, by its id: the newest.
        sharers: how many of the responses have a part of a conversation, by its id: those that continue one another
            have the same.
    """

    __slots__ = ("items", "responses", "sharers")

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, str] = {}
        self.sharers: dict[int, int] = {}

    def add(self, identifier: str, response: StoredResponse) -> int:
        """How many bytes that takes."""
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
        """How many bytes that frees."""
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
        self._shares: dict[bytes, _Share] = {}
        self._bytes = Holdings()
        self._counts = Holdings()
        # Whose each response is, and the time of its last use; least recently used first.
        self._used: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        # Those that were deleted while they ran, until they end.
        self._deleted: set[str] = set()

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Of all responses; what several of one key share is counted once."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._used

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
        owner = response.owner
        self._bytes.add(owner, self._shares.setdefault(owner, _Share()).add(identifier, response))
        self._counts.add(owner, 1)
        self._used[identifier] = owner, self._clock()
        while self._bytes.total > self._max_bytes:
            self._remove_oldest(self._bytes.largest())
        while self._counts.total > self._max_responses:
            self._remove_oldest(self._counts.largest())
        self.expire()

    def get(self, identifier: str, owner: bytes) -> StoredResponse:
        """Raises NotFoundError, also for a response of another key."""
        self.expire()
        share = self._shares.get(owner)
        if share is None or identifier not in share.responses:
            raise NotFoundError(f"There is no response with the id {shown_id(identifier)}.")
        self._used[identifier] = owner, self._clock()
        self._used.move_to_end(identifier)
        share.responses.move_to_end(identifier)
        return share.responses[identifier]

    def continued(self, identifier: str, owner: bytes) -> tuple[bytes, ...]:
        """What a response that continues this one begins with. Raises NotFoundError, InvalidRequestError if it runs."""
        stored = self.get(identifier, owner)
        if not stored.done:
            raise InvalidRequestError("The response has not ended yet.", param="previous_response_id")
        return stored.conversation

    def with_item(self, item_id: str, owner: bytes) -> StoredResponse:
        """The newest response that has this among its own items. Raises NotFoundError."""
        share = self._shares.get(owner)
        if share is None or item_id not in share.items:
            raise NotFoundError(f"There is no stored item with the id {shown_id(item_id)}.")
        return self.get(share.items[item_id], owner)

    def delete(self, identifier: str, owner: bytes) -> None:
        """Raises NotFoundError as `get` does."""
        if not self.get(identifier, owner).done:
            self._deleted.add(identifier)
        self._remove(identifier)

    def expire(self) -> None:
        """Forgets those whose time is over."""
        oldest = self._clock() - self._time_to_live
        while self._used:
            identifier = next(iter(self._used))
            if self._used[identifier][1] > oldest:
                return
            self._remove(identifier)

    def _remove_oldest(self, owner: bytes) -> None:
        self._remove(next(iter(self._shares[owner].responses)))

    def _remove(self, identifier: str) -> None:
        if (found := self._used.pop(identifier, None)) is None:
            return
        owner, _ = found
        share = self._shares[owner]
        self._bytes.add(owner, -share.remove(identifier))
        self._counts.add(owner, -1)
        if not share.responses:
            del self._shares[owner]
