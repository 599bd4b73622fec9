"""What the HTTP side needs of the rest of the gateway: the seams at which tests put fakes.

The real ones are flow.generation.Generator and Generation, workers.registry.Registry and text.pipeline.TextPipeline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from gateway.flow.admission import Room
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.outbox import Receiver
from gateway.text.detokenizer import Detokenizer
from gateway.text.formats import ModelFormats
from shared.errors import PeltonError
from shared.messages import WorkerFacts


class TextPipelineLike(Protocol):
    """Text of one model to token ids and back."""

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that `template_kwargs` may have: what the chat template reads and the renderer does not fill in."""
        ...

    @property
    def takes_documents(self) -> bool:
        """Whether the chat template reads `documents`."""
        ...

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Ids of a plain prompt, tokenized in a thread; special-token text in it is special.

        Args:
            add_special_tokens: put the beginning-of-text id in front where the model wants one and text has none.
            max_tokens: refuse, before tokenizing, text that certainly has more tokens (ContextLengthError).
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
        """Ids of a conversation by the model's chat template; special-token text in messages is ordinary text.

        Args:
            documents: for templates that take them.
            continue_final: the prompt ends inside the last message, whose content is a string, not behind it.

        Raises InvalidRequestError with the template's own message where it refuses.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so in the vocabulary."""
        ...

    async def tokens_containing(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Ids of all tokens whose bytes contain one of the texts, in order."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool, shown_ids: frozenset[int] = ...) -> Detokenizer:
        """A new one for one choice."""
        ...


class ModelEntryLike(Protocol):
    """One served model. `name` is canonical, `names` are all that clients may use."""

    @property
    def name(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def facts(self) -> WorkerFacts: ...
    @property
    def pipeline(self) -> TextPipelineLike: ...
    @property
    def formats(self) -> ModelFormats: ...


class ModelsLike(Protocol):
    """Which models are served now (Registry)."""

    def model(self, name: str) -> ModelEntryLike:
        """Raises ModelNotFoundError; UnavailableError where the model is known but no worker of it lives."""
        ...

    def models(self) -> Sequence[ModelEntryLike]: ...

    def ready(self) -> tuple[bool, str]:
        """Whether a worker answered a round trip through its engine loop lately, and else why not."""
        ...


class GenerationLike(AbstractAsyncContextManager["GenerationLike"], Protocol):
    """A running request. Leaving the `async with` in any way cancels what is left of it.

    Iteration yields TextDeltas, one with a finish_reason for each choice, and ends after the last of them; it raises
    a PeltonError (WorkerLostError, UnavailableError, InternalError, ...) where the request failed.
    """

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    def pass_to(self, receiver: Receiver) -> None:
        """From now on what comes while the iteration waits may go to `receiver` instead; the ends never do."""
        ...

    def close(self) -> None:
        """What leaving the `async with` does; idempotent."""
        ...


class ReservationLike(Protocol):
    """Room for a request that its caller runs in parts (beam search, embeddings): admitted and measured as one."""

    def submit(self, part: GenerationRequest) -> GenerationLike:
        """Sends a part; enter the result at once. The errors are those of GeneratorLike, but for the limits."""
        ...

    @property
    def tokens_per_second(self) -> float:
        """At which the model's workers together read prompts, lately; 0 while unknown."""
        ...

    def first_token(self) -> None:
        """The prompt is computed."""
        ...

    def complete(self, deltas: Sequence[TextDelta]) -> None:
        """The request ended well, with these as the last of its choices."""
        ...

    def fail(self, error: PeltonError) -> None:
        """The request failed."""
        ...

    def close(self) -> None:
        """Gives the room back; idempotent. A request that is not complete by then was left by its client."""
        ...


class GeneratorLike(Protocol):
    """Takes requests in."""

    @property
    def request_timeout(self) -> float:
        """Seconds that a request may go without any token."""
        ...

    def reserve(
        self, request: GenerationRequest, *, num_sequences: int | None = None, num_tokens: int | None = None
    ) -> ReservationLike:
        """Admits a request that its caller runs in parts. The errors are those of submit.

        Args:
            num_sequences, num_tokens: of the parts that run at a time and of their prompts; None: request.n, and the
                request's prompt.
        """
        ...

    def submit(self, request: GenerationRequest) -> GenerationLike:
        """Admits, routes and sends; enter the result at once: `async with generator.submit(request) as generation`.

        Raises:
            ModelNotFoundError, ContextLengthError, InvalidRequestError: the request cannot be served.
            RateLimitError: an admission limit is reached.
            UnavailableError: no worker can take it.
        """
        ...


class AdmittingGeneratorLike(GeneratorLike, Protocol):
    """The one that every request enters by."""

    def room(self) -> tuple[Room, Room]:
        """What admission leaves now: of sequences, running or waiting, and of prompt tokens that wait."""
        ...
