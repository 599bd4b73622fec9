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
    """

    owner: bytes
    body: bytes
    input: tuple[bytes, ...]
    output: bytes = b"[]"
    background: bool = False
    done: bool = True

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """What a response that continues this one begins with."""
        return (*self.input, self.output)

    @property
    def size(self) -> int:
        """Bytes, shared ones too: so the store's bound holds however much is shared."""
        return _OVERHEAD + len(self.body) + len(self.output) + sum(len(part) + 64 for part in self.input)


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
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._responses

    def put(self, identifier: str, response: StoredResponse) -> None:
        """Keeps a response, in the place of an earlier state of it; not one that is larger than all room."""
        self._remove(identifier)
        if response.size > self._max_bytes:
            return
        response = _trimmed(response)
        self._responses[identifier] = response, self._clock()
        self.num_bytes += response.size
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

    def delete(self, identifier: str, owner: bytes) -> None:
        """Raises NotFoundError as `get` does."""
        self.get(identifier, owner)
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
            self.num_bytes -= found[0].size
