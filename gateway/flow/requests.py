"""Interfaces through which the HTTP side uses the rest of the gateway; tests replace them by fakes.

The implementations are flow.generation.Generator and Generation, cluster.registry.Registry and
text.pipeline.TextPipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.flow.admission import Room
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.outbox import Receiver
from gateway.text.detokenizer import Detokenizer
from gateway.text.formats import ModelFormats
from shared.errors import PeltonError
from shared.messages import WorkerFacts


class TextPipelineLike(Protocol):
    """Conversion between the text and the token ids of one model."""

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads and the renderer does not fill in; `template_kwargs` may set them."""
        ...

    @property
    def takes_documents(self) -> bool:
        """True if the chat template reads `documents`."""
        ...

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Tokenize a plain prompt in a thread. Text of special tokens becomes special tokens.

        Args:
            text: The prompt.
            add_special_tokens: Prepend the beginning-of-text id if the model expects one and the text has none.
            max_tokens: Refuse, before tokenizing, text that certainly has more tokens.
            param: Name of the field for error messages.

        Raises:
            ContextLengthError: The text has more than max_tokens tokens.
        """
        ...

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Render a conversation with the model's chat template and tokenize it.

        Text of special tokens in messages is ordinary text.

        Args:
            messages: The conversation.
            tools: Tools for templates that support them.
            add_generation_prompt: End the prompt where the assistant's message begins.
            template_kwargs: Variables for the template.
            documents: Documents for templates that support them.
            continue_final: End the prompt inside the last message, whose content is a string.
            max_tokens: Refuse, before tokenizing, text that certainly has more tokens.

        Raises:
            InvalidRequestError: The template refuses the conversation; the message is the template's.
            ContextLengthError: The prompt has more than max_tokens tokens.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert token ids to text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text in the vocabulary."""
        ...

    async def tokens_containing(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ids, in order, of all tokens whose bytes contain one of the texts."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool, shown_ids: frozenset[int] = ...) -> Detokenizer:
        """Return a new detokenizer for one choice."""
        ...


class ModelEntryLike(Protocol):
    """One served model. `name` is canonical; `names` are all names that clients may use."""

    @property
    def name(self) -> str:
        """Canonical name."""

    @property
    def names(self) -> Sequence[str]:
        """All names that clients may use."""

    @property
    def facts(self) -> WorkerFacts:
        """Properties that all of its workers share."""

    @property
    def pipeline(self) -> TextPipelineLike:
        """Text pipeline of the model."""

    @property
    def formats(self) -> ModelFormats:
        """Reasoning and tool-call formats of the model."""


class ModelsLike(Protocol):
    """Models that are served now (Registry)."""

    def model(self, name: str) -> ModelEntryLike:
        """Return a model by name.

        Raises:
            ModelNotFoundError: No worker serves the model.
            UnavailableError: The model is known but has no live worker.
        """
        ...

    def models(self) -> Sequence[ModelEntryLike]:
        """Return the models that have a worker now."""

    def ready(self) -> tuple[bool, str]:
        """Return whether a worker recently answered a ping through its engine loop, and the reason if not."""
        ...


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
