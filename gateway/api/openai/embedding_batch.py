"""Batch of embedding inputs, of which a bounded number runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.flow.events import GenerationRequest
from gateway.flow.generation import Generation, Generator, Reservation
from shared.errors import InternalError, PeltonError, UnavailableError
from shared.messages import WorkerFacts

T = TypeVar("T")

STEPS_IN_FLIGHT = 4
"""Limit on the tokens in flight, in full steps of a worker: enough that it never waits for the gateway."""
SECONDS_IN_FLIGHT = 1.0
"""Limit on the tokens in flight, as the time the workers need for them: other requests wait behind them."""
RETRIES = 8
RETRY_SECONDS = 0.25
"""A worker in a long step is not ready for a moment; a batch retries instead of discarding its results."""


async def embed(
    generator: Generator,
    requests: Sequence[GenerationRequest],
    facts: WorkerFacts,
    shape: Callable[[bytes], T],
) -> list[T]:
    """Return `shape(embedding)` for each request, in the order of the requests.

    The sub-requests in flight are bounded by the number that one worker runs at a time, by a few of its steps, and by
    the tokens that it reads in a second; a sub-request is sent when another has ended. Requests of other clients run
    between them. Admission counts the batch as one request of this size.

    Args:
        generator: Where the sub-requests are submitted.
        requests: The sub-requests.
        facts: Facts about the model's workers.
        shape: Converts an embedding to its shape in the response.

    Raises:
        PeltonError: The first error of any sub-request; the others are cancelled.
    """
    sizes = [len(request.prompt_token_ids) for request in requests]
    max_parts = min(facts.max_num_seqs, len(requests))
    step_tokens = STEPS_IN_FLIGHT * facts.max_num_batched_tokens
    num_tokens = min(max(step_tokens, *sizes), sum(heapq.nlargest(max_parts, sizes)))
    reservation = generator.reserve(requests[0], num_sequences=max_parts, num_tokens=num_tokens)

    def max_tokens() -> float:
        speed = reservation.tokens_per_second
        return min(step_tokens, speed * SECONDS_IN_FLIGHT) if speed else facts.max_num_batched_tokens

    results: dict[int, T] = {}
    in_flight: dict[asyncio.Task[None], int] = {}

    async def run(index: int) -> None:
        results[index] = shape(await _embedding(reservation, requests[index]))

    try:
        async with asyncio.TaskGroup() as group:
            for index, size in enumerate(sizes):
                # A sub-request that is longer than the limit runs alone.
                while in_flight and (len(in_flight) >= max_parts or sum(in_flight.values()) + size > max_tokens()):
                    done, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        del in_flight[task]
                in_flight[group.create_task(run(index))] = size
                await asyncio.sleep(0)  # the task sends now; other tasks run between two sub-requests
        reservation.complete(())
    except ExceptionGroup as failures:
        error = failures.exceptions[0]
        if isinstance(error, PeltonError):
            reservation.fail(error)
        raise error from None
    finally:
        reservation.close()
    return [results[index] for index in range(len(requests))]


async def _embedding(reservation: Reservation, request: GenerationRequest) -> bytes:
    found: bytes | None = None
    async with await _submitted(reservation, request) as generation:
        async for delta in generation:
            found = delta.embedding
    if found is None:
        raise InternalError("The generation ended without an embedding.")
    return found


async def _submitted(reservation: Reservation, request: GenerationRequest) -> Generation:
    for _ in range(RETRIES):
        with contextlib.suppress(UnavailableError):
            return reservation.submit(request)
        await asyncio.sleep(RETRY_SECONDS)
    return reservation.submit(request)
