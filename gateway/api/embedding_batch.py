"""The inputs of one request for embeddings, run a bounded number at a time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from gateway.flow.events import GenerationRequest
from gateway.flow.requests import GeneratorLike, ReservationLike
from shared.errors import InternalError, PeltonError

T = TypeVar("T")


async def embed(
    generator: GeneratorLike,
    requests: Sequence[GenerationRequest],
    max_in_flight: int,
    shape: Callable[[bytes], T],
) -> list[T]:
    """What `shape` makes of each embedding, in the order of the requests, which may end in any.

    To admission they are one request: as many sequences as run at a time, with the most prompt tokens that these can
    have. The next one is sent when one has ended; so what others send meanwhile has its turn between them.

    Raises the first PeltonError of any, after the others were cancelled; being cancelled cancels all.
    """
    width = min(max_in_flight, len(requests))
    num_tokens = sum(heapq.nlargest(width, [len(request.prompt_token_ids) for request in requests]))
    room = generator.reserve(requests[0], num_sequences=width, num_tokens=num_tokens)
    results: list[T | None] = [None] * len(requests)
    left = iter(enumerate(requests))
    tasks: list[asyncio.Task[None]] = []
    try:
        for _ in range(width):
            tasks.append(asyncio.create_task(_run(room, left, results, shape)))
            await asyncio.sleep(0)  # each sends its first one now: in between others have their turn
        await asyncio.gather(*tasks)
        room.complete(())
    except PeltonError as error:
        room.fail(error)
        raise
    finally:
        try:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            room.close()
    return [result for result in results if result is not None]


async def _run(
    room: ReservationLike,
    left: Iterator[tuple[int, GenerationRequest]],
    results: list[T | None],
    shape: Callable[[bytes], T],
) -> None:
    """One after another of what is left."""
    for index, request in left:
        async with room.submit(request) as generation:
            async for delta in generation:
                if delta.embedding is not None:
                    results[index] = shape(delta.embedding)
        if results[index] is None:
            raise InternalError("The generation ended without an embedding.")
