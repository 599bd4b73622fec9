"""Replacement of the gateway's core: a byte tokenizer, one model, and generations that play prepared events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.flow.admission import Room
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.outbox import Receiver
from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text.formats import ModelFormats
from gateway.text.pipeline import EncodedChat
from gateway.text.tools.prompting import TemplateSupport
from shared.errors import ContextLengthError, ModelNotFoundError
from shared.messages import DraftCounts, TokenLogprobs, WorkerFacts
from shared.sampling_params import SamplingParams
from tests.fakes.vectors import HIDDEN_SIZE, vector_of

EOS = 257
MODEL = "fake-model"
SUPPORT = TemplateSupport(tools=True, calls=True)

Step = TextDelta | float | Exception | asyncio.Event
Script = Callable[[GenerationRequest], Iterable[Step]]


def facts(**changes: Any) -> WorkerFacts:
    """Return the facts of the fake model."""
    values: dict[str, Any] = {
        "model_names": [MODEL, "org/alias"],
        "max_model_len": 4096,
        "num_pages": 1024,
        "page_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "vocab_size": 258,
        "eos_token_ids": [EOS],
        "model_hash": "m",
        "bundle_hash": "b",
        "created": 1_700_000_000,
        "hidden_size": HIDDEN_SIZE,
    }
    return WorkerFacts(**{**values, **changes})


class BytePipeline:
    """Text pipeline whose token ids are bytes; 256 and 257 are special tokens."""

    template: str | None = None
    template_variables = frozenset(["enable_thinking"])
    takes_documents = False

    def __init__(self) -> None:
        self.template_kwargs: list[dict[str, Any]] = []
        self.messages: list[list[dict[str, Any]]] = []
        self.marks: dict[str, int] = {}

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        if max_tokens is not None and len(text) > max_tokens * 4:
            raise ContextLengthError(f"longer than the maximum context length of {max_tokens}", param=param)
        return list(text.encode())

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
    ) -> EncodedChat:
        self.template_kwargs.append(dict(template_kwargs or {}))
        self.messages.append([dict(message) for message in messages])
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text += "assistant:" if add_generation_prompt else ""
        return EncodedChat(list(text.encode()), text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_id(self, text: str) -> int | None:
        return self.marks.get(text)

    async def tokens_containing(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(sorted({ord(text) for text in texts if len(text) == 1}))

    def detokenizer(self, *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
        table = TokenBytes([bytes([byte]) for byte in range(256)], frozenset(), strip_leading_space=False)
        return Detokenizer(table, skip_special_tokens=skip_special_tokens)


@dataclass
class FakeEntry:
    """Registry entry of the only model."""

    facts: WorkerFacts = field(default_factory=facts)
    pipeline: BytePipeline = field(default_factory=BytePipeline)
    formats: ModelFormats = field(default_factory=lambda: ModelFormats(template=SUPPORT))

    @property
    def name(self) -> str:
        return self.facts.model_names[0]

    @property
    def names(self) -> Sequence[str]:
        return self.facts.model_names


class FakeModels:
    """Registry with one model; `is_ready` and `reason` determine the answer of /ready."""

    def __init__(self, entry: FakeEntry | None = None) -> None:
        self.entry = entry or FakeEntry()
        self.is_ready = True

    def model(self, name: str) -> FakeEntry:
        if name not in self.entry.names:
            raise ModelNotFoundError("There is no model with that name.", param="model")
        return self.entry

    def models(self) -> Sequence[FakeEntry]:
        return [self.entry]

    def ready(self) -> tuple[bool, str]:
        return self.is_ready, "" if self.is_ready else "No worker is ready."


class FakeGeneration:
    """Generation that plays steps: it yields a TextDelta, sleeps for a number, awaits an Event, raises an exception."""

    def __init__(self, owner: FakeGenerator, request: GenerationRequest, steps: Iterable[Step]) -> None:
        self._owner = owner
        self._steps = steps
        self.request = request
        self.ended = False
        self.cancelled = False

    async def __aenter__(self) -> FakeGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._owner.live.discard(self)
        self.cancelled = self.cancelled or not self.ended

    def pass_to(self, receiver: Receiver) -> None:
        """Pass all events to the receiver."""

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        for step in self._steps:
            if isinstance(step, Exception):
                self.ended = True
                raise step
            if isinstance(step, TextDelta):
                await asyncio.sleep(0)
                yield step
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await asyncio.sleep(step)
        self.ended = True


class FakeReservation:
    """Reservation for a request in parts, which records how it ended."""

    def __init__(self, owner: FakeGenerator, request: GenerationRequest) -> None:
        self._owner = owner
        self.request = request
        self.outcome: Exception | Sequence[TextDelta] | None = None
        self.begun = self.closed = False

    def submit(self, part: GenerationRequest) -> FakeGeneration:
        assert not self.closed
        return self._owner.submit(part)

    tokens_per_second = 0.0

    def first_token(self) -> None:
        self.begun = True

    def complete(self, deltas: Sequence[TextDelta]) -> None:
        self.outcome = deltas

    def fail(self, error: Exception) -> None:
        self.outcome = error

    def close(self) -> None:
        self.closed = True


class FakeGenerator:
    """Generator that plays `script` for each generation request and records all requests.

    Attributes:
        embedding_script: Events played for each embedding request.
        submit_error: Error raised by the next submit calls, if set.
        live: Generations that were submitted and not closed.
        request_timeout: See Generator.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or spell("Hello")
        self.embedding_script: Script = embed
        self.submit_error: Exception | None = None
        self.request_timeout = 600.0
        self.generations: list[FakeGeneration] = []
        self.live: set[FakeGeneration] = set()
        self.reservations: list[FakeReservation] = []

    @property
    def requests(self) -> list[GenerationRequest]:
        return [generation.request for generation in self.generations]

    def room(self) -> tuple[Room, Room]:
        return Room(384, 383, 1.0), Room(262144, 258144, 361.2)

    def reserve(
        self, request: GenerationRequest, *, num_sequences: int | None = None, num_tokens: int | None = None
    ) -> FakeReservation:
        if self.submit_error is not None:
            raise self.submit_error
        self.reservations.append(FakeReservation(self, request))
        return self.reservations[-1]

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.submit_error is not None:
            raise self.submit_error
        script = self.script if request.pooling is None else self.embedding_script
        generation = FakeGeneration(self, request, script(request))
        self.live.add(generation)
        self.generations.append(generation)
        return generation


def logprob(token_id: int, value: float | None = -0.5, alternatives: int = 0) -> TokenLogprobs:
    """Return log probabilities whose alternatives are this token and the following ids."""
    ids = [(token_id + offset) % 256 for offset in range(alternatives)]
    return TokenLogprobs(token_id, value, 1, ids, [(value or 0.0) - offset for offset in range(alternatives)])


_PLAIN = GenerationRequest(request_id="r", model=MODEL, prompt_token_ids=[1], sampling=SamplingParams())


def spell(
    text: str, finish: str = "stop", cached: int = 0, drafts: DraftCounts | None = None
) -> Callable[..., Iterable[Step]]:
    """Return a script in which each choice yields `text`, one code point per event, and reports `drafts` at the end."""

    def script(request: GenerationRequest = _PLAIN) -> Iterable[Step]:
        wanted = request.sampling.logprobs
        for position, character in enumerate(text):
            for choice in range(request.n):
                ids = list(character.encode())
                first = position == 0
                yield TextDelta(
                    choice,
                    character,
                    ids,
                    logprobs=None if wanted is None else [logprob(token_id, -0.5, wanted) for token_id in ids],
                    num_cached_tokens=cached if first else None,
                    prompt_logprobs=_prompt_logprobs(request) if first and choice == 0 else None,
                )
        for choice in range(request.n):
            yield TextDelta(choice, "", [], finish_reason=finish, drafts=drafts)

    return script


def embed(request: GenerationRequest) -> Iterable[Step]:
    """Return a script that yields the prompt's embedding."""
    vector = vector_of(request.prompt_token_ids, request.pooling)
    return [TextDelta(0, "", [], finish_reason="stop", num_cached_tokens=0, embedding=vector)]


def _prompt_logprobs(request: GenerationRequest) -> list[TokenLogprobs] | None:
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return None
    ids = request.prompt_token_ids
    return [logprob(ids[0], None), *(logprob(token_id, -1.0, wanted) for token_id in ids[1:])]
