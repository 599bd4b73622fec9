"""The inputs of one request for embeddings, run a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.flow.events import GenerationRequest
from gateway.flow.requests import GenerationLike, GeneratorLike, ReservationLike
from shared.errors import InternalError, PeltonError, UnavailableError
from shared.messages import WorkerFacts

T = TypeVar("T")

STEPS_IN_FLIGHT = 4
"""So many full steps of a worker may be under way to it: enough that it never waits for us."""
SECONDS_IN_FLIGHT = 1.0
"""And not more than it reads in this time, where that is less: others wait behind it."""
RETRIES = 8
RETRY_SECONDS = 0.25
"""A worker whose step takes long is not ready for a moment: what a batch has already is not thrown away for that."""


class Window:
    """What of a batch is at the workers: so many parts, and so many tokens of them, or one that is longer.

    Args:
        max_tokens: asked anew for each part.
    """

    def __init__(self, max_parts: int, max_tokens: Callable[[], float]) -> None:
        self._max_parts = max_parts
        self._max_tokens = max_tokens
        self._num_parts = 0
        self._num_tokens = 0
        self._left = asyncio.Event()

    async def enter(self, num_tokens: int) -> None:
        """Waits for room. One at a time may wait."""
        while self._num_parts and (
            self._num_parts >= self._max_parts or self._num_tokens + num_tokens > self._max_tokens()
        ):
            self._left.clear()
            await self._left.wait()
        self._num_parts += 1
        self._num_tokens += num_tokens

    def leave(self, num_tokens: int) -> None:
        """Gives the room of a part back."""
        self._num_parts -= 1
        self._num_tokens -= num_tokens
        self._left.set()


async def embed(
    generator: GeneratorLike,
    requests: Sequence[GenerationRequest],
    facts: WorkerFacts,
    shape: Callable[[bytes], T],
) -> list[T]:
    """What `shape` makes of each embedding, in the order of the requests, which may end in any.

    What is at the workers at a time is bounded by what one of them runs at a time, by a few of its steps, and by what
    it reads in a second; the next part is sent when one has ended. So what others send meanwhile has its turn between
    them. To admission the whole is one request that has no more than this.

    Raises the first PeltonError of any part, after the others were cancelled; being cancelled cancels all.
    """
    sizes = [len(request.prompt_token_ids) for request in requests]
    max_parts = min(facts.max_num_seqs, len(requests))
    most = STEPS_IN_FLIGHT * facts.max_num_batched_tokens
    num_tokens = min(max(most, *sizes), sum(heapq.nlargest(max_parts, sizes)))
    room = generator.reserve(requests[0], num_sequences=max_parts, num_tokens=num_tokens)

    def max_tokens() -> float:
        speed = room.tokens_per_second
        return min(most, speed * SECONDS_IN_FLIGHT) if speed else facts.max_num_batched_tokens

    window = Window(max_parts, max_tokens)
    results: dict[int, T] = {}

    async def run(index: int) -> None:
        try:
            results[index] = shape(await _embedding(room, requests[index]))
        finally:
            window.leave(sizes[index])

    try:
        async with asyncio.TaskGroup() as group:
            for index, size in enumerate(sizes):
                await window.enter(size)
                group.create_task(run(index))
                await asyncio.sleep(0)  # it is sent now: between two of them others have their turn
        room.complete(())
    except ExceptionGroup as failures:
        error = failures.exceptions[0]
        if isinstance(error, PeltonError):
            room.fail(error)
        raise error from None
    finally:
        room.close()
    return [results[index] for index in range(len(requests))]


async def _embedding(room: ReservationLike, request: GenerationRequest) -> bytes:
    found: bytes | None = None
    async with await _submitted(room, request) as generation:
        async for delta in generation:
            found = delta.embedding
    if found is None:
        raise InternalError("The generation ended without an embedding.")
    return found


async def _submitted(room: ReservationLike, request: GenerationRequest) -> GenerationLike:
    for _ in range(RETRIES):
        with contextlib.suppress(UnavailableError):
            return room.submit(request)
        await asyncio.sleep(RETRY_SECONDS)
    return room.submit(request)
