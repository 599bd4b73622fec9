"""Base of the running requests: flow.generation.Generation, and the beam search on top of generations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from gateway.flow.events import TextDelta
from gateway.flow.outbox import Receiver


class RunningRequest(ABC):
    """Asynchronous context and iterator. Leaving the `async with` in any way cancels the rest of the request.

    Iteration yields TextDeltas, one with a finish_reason for each choice, and ends after the last of them. It raises a
    PeltonError (WorkerLostError, UnavailableError, InternalError, ...) if the request failed.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> TextDelta: ...

    @abstractmethod
    def pass_to(self, receiver: Receiver) -> None:
        """Pass deltas that arrive while the iteration waits to `receiver`, except the ends of choices."""

    @abstractmethod
    def close(self) -> None:
        """Release everything without waiting. Idempotent."""
