"""Interfaces through which the HTTP side uses the rest of the gateway; tests replace them by fakes.

The implementations are flow.generation.Generator and Generation, and the beam search on top of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self

from gateway.flow.admission import Room
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.outbox import Receiver
from shared.errors import PeltonError


class ClosedOnExit(ABC):
    """Asynchronous context that calls `close` however it is left."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release everything without waiting. Idempotent."""


class GenerationLike(AbstractAsyncContextManager["GenerationLike"], Protocol):
    """Running request. Leaving the `async with` in any way cancels the rest of it.

    Iteration yields TextDeltas, one with a finish_reason for each choice, and ends after the last of them. It raises a
    PeltonError (WorkerLostError, UnavailableError, InternalError, ...) if the request failed.
    """

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    def pass_to(self, receiver: Receiver) -> None:
        """Pass deltas that arrive while the iteration waits to `receiver`, except the ends of choices."""
        ...

    def close(self) -> None:
        """End the request as leaving the `async with` does; idempotent."""
        ...


class ReservationLike(Protocol):
    """Admitted room for a request that its caller runs in parts (beam search, embeddings). It counts as one request."""

    def submit(self, part: GenerationRequest) -> GenerationLike:
        """Send a part; enter the result at once. Raises the errors of GeneratorLike except those of the limits."""
        ...

    @property
    def tokens_per_second(self) -> float:
        """Recent speed at which the model's workers together compute prompts; 0 while unknown."""
        ...

    def first_token(self) -> None:
        """Record that the prompt is computed."""
        ...

    def complete(self, deltas: Sequence[TextDelta]) -> None:
        """Record success, with the last deltas of the choices."""
        ...

    def fail(self, error: PeltonError) -> None:
        """Record failure."""
        ...

    def close(self) -> None:
        """Release the room; idempotent. A request that is not complete by then counts as abandoned by its client."""
        ...


class GeneratorLike(Protocol):
    """Entry for requests."""

    @property
    def request_timeout(self) -> float:
        """Seconds that a request may go without any token."""
        ...

    def reserve(
        self, request: GenerationRequest, *, num_sequences: int | None = None, num_tokens: int | None = None
    ) -> ReservationLike:
        """Admit a request that its caller runs in parts. Raises the errors of submit.

        Args:
            request: The whole request.
            num_sequences: Sequences of the parts that run at a time; None for request.n.
            num_tokens: Prompt tokens of these parts; None for the tokens of the request's prompt.
        """
        ...

    def submit(self, request: GenerationRequest) -> GenerationLike:
        """Admit, route and send a request. Enter the result at once.

        Raises:
            ModelNotFoundError: No worker serves the model.
            ContextLengthError: The prompt can never fit.
            InvalidRequestError: The request is invalid.
            RateLimitError: An admission limit is reached.
            UnavailableError: No worker can take the request.
        """
        ...


class AdmittingGeneratorLike(GeneratorLike, Protocol):
    """Generator that applies admission control; every request enters through it."""

    def room(self) -> tuple[Room, Room]:
        """Return the room of running or waiting sequences, and of waiting prompt tokens."""
        ...
