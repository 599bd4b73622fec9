"""Beam search over workers that know nothing of it.

Each step sends the live beams as requests for one token, and reads the likeliest tokens from the report on it. The
workers' prefix cache makes that cheap: all but the newest tokens of a beam are there. Scores and ends are those of
`transformers`: a hypothesis scores the sum of its log-probabilities / length ** length_penalty.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import msgspec

from gateway.flow.choice import choices_of
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.requests import GenerationLike, GeneratorLike, ReservationLike, TextPipelineLike
from shared.errors import InternalError, InvalidRequestError, PeltonError
from shared.messages import Finish, FinishReason, Output, TokenLogprobs
from shared.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAM_TOKENS = 131_072
"""Tokens of all beams of a prompt. In each step the worker finds every beam's pages again; others wait for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Attributes:
    width: beams that live at a time, and hypotheses that are kept.
    num_returned: the best of them, which are the choices.
    length_penalty: above 0 favours long hypotheses, below 0 short ones.
    early_stopping: True: end with the first `width` hypotheses; False: when no live beam scores higher at its
        present length; "never": when none can at any length.
    """

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] | str = False


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of one beam, or of a hypothesis; `score` is their sum, or the hypothesis's own."""

    tokens: tuple[TokenLogprobs, ...]
    score: float

    @property
    def token_ids(self) -> list[int]:
        """The generated ids."""
        return [token.token_id for token in self.tokens]


class BeamState:
    """The search itself, without workers: `advance` it with a report on each live beam until it is `done`.

    Args:
        stop_ids: tokens that end a hypothesis.
        min_tokens: hypotheses do not end before they have as many.
        masked_ids: tokens that are never chosen.
    """

    def __init__(
        self,
        params: BeamParams,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        masked_ids: Collection[int] = (),
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self.stop_ids = frozenset(stop_ids)
        self._masked_ids = frozenset(masked_ids)
        self._length = 0
        self.live = [Beam((), 0.0)]
        self.finished: list[Beam] = []
        self.done = False

    @property
    def num_alternatives(self) -> int:
        """How many of the likeliest tokens a report must have: each beam continues in `width` ways at most, and the
        tokens that end or are masked come on top."""
        return self._params.width + len(self.stop_ids | self._masked_ids)

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """One more token; reports[i] is on what may follow live[i]."""
        width = self._params.width
        self._length += 1
        at_end = self._length >= self._max_tokens
        live: list[Beam] = []
        for rank, (score, index, place) in enumerate(self._continuations(reports)):
            report = reports[index]
            if at_end or report.top_ids[place] in self.stop_ids:
                # What ends below the first `width` has better ones before it, which go on.
                if rank < width:
                    tokens = self._continued(index, report, place)
                    self.finished.append(Beam(tokens, score / self._length**self._params.length_penalty))
            elif len(live) < width:
                live.append(Beam(self._continued(index, report, place), score))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        self.live = live
        self.done = at_end or not live or not self._can_improve()

    def _continuations(self, reports: Sequence[TokenLogprobs]) -> list[tuple[float, int, int]]:
        """Score, index of the live beam and place in its report of whatever may follow, best first."""
        masked = self._masked_ids | (self.stop_ids if self._length <= self._min_tokens else frozenset())
        found = [
            (beam.score + logprob, index, place)
            for index, (beam, report) in enumerate(zip(self.live, reports, strict=True))
            for place, (token_id, logprob) in enumerate(zip(report.top_ids, report.top_logprobs, strict=True))
            if token_id not in masked
        ]
        return sorted(found, key=lambda entry: -entry[0])

    def _continued(self, index: int, report: TokenLogprobs, place: int) -> tuple[TokenLogprobs, ...]:
        chosen = msgspec.structs.replace(
            report, token_id=report.top_ids[place], logprob=report.top_logprobs[place], rank=place + 1
        )
        return (*self.live[index].tokens, chosen)

    def _can_improve(self) -> bool:
        if len(self.finished) < self._params.width:
            return True
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if early is True:
            return False
        length = self._max_tokens if early == "never" and penalty > 0.0 else self._length
        best: float = self.live[0].score / length**penalty
        return best > self.finished[-1].score


class BeamSearcher:
    """Takes requests in as flow.requests.GeneratorLike does, and answers each with the best hypotheses.

    Args:
        eos_token_ids, vocab_size: of the model.
    """

    def __init__(
        self,
        generator: GeneratorLike,
        params: BeamParams,
        pipeline: TextPipelineLike,
        eos_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self._generator = generator
        self._params = params
        self._pipeline = pipeline
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size

    def submit(self, request: GenerationRequest) -> BeamSearch:
        """See GeneratorLike. Raises InvalidRequestError where workers do not report enough for so many beams."""
        sampling = request.sampling
        state = BeamState(
            self._params,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_token_ids),
            masked_ids=self._eos_token_ids - set(sampling.stop_token_ids) if sampling.ignore_eos else (),
        )
        width = self._params.width
        param = "n" if width == self._params.num_returned else "best_of"
        excess = state.num_alternatives - MAX_LOGPROBS
        if excess > 0:
            raise InvalidRequestError(
                f"Beam search has at most {width - excess} beams with this model's end-of-text tokens and these "
                f"stop_token_ids, got {width}.",
                param=param,
            )
        num_tokens = width * (len(request.prompt_token_ids) + sampling.max_tokens)
        if num_tokens > MAX_BEAM_TOKENS:
            raise InvalidRequestError(
                f"{width} beams of a prompt of {len(request.prompt_token_ids)} tokens and max_tokens = "
                f"{sampling.max_tokens} are {num_tokens} tokens; beam search has at most {MAX_BEAM_TOKENS}.",
                param=param,
            )
        room = dataclasses.replace(request, n=self._params.width)
        return BeamSearch(self._generator.reserve(room), request, self._params, state, self._pipeline, self._vocab_size)

    def reserve(self, request: GenerationRequest) -> ReservationLike:
        """See GeneratorLike."""
        return self._generator.reserve(request)


class BeamSearch:
    """A running search, as flow.requests.GenerationLike: its deltas all come at the end, one a choice."""

    def __init__(
        self,
        room: ReservationLike,
        request: GenerationRequest,
        params: BeamParams,
        state: BeamState,
        pipeline: TextPipelineLike,
        vocab_size: int,
    ) -> None:
        self._room = room
        self._request = request
        self._params = params
        self._state = state
        self._choices = choices_of(request, pipeline)
        self._vocab_size = vocab_size
        self._parts: list[GenerationLike] = []
        self._first: TextDelta | None = None
        self._results: deque[TextDelta] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what runs and gives the room back. Idempotent."""
        for part in self._parts:
            part.close()
        self._room.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if self._results is None:
            try:
                while not self._state.done:
                    self._state.advance(await self._step())
            except PeltonError as error:
                self._room.fail(error)
                raise
            self._results = deque(self._deltas())
            self._room.complete(list(self._results))
        if not self._results:
            raise StopAsyncIteration
        return self._results.popleft()

    async def _step(self) -> list[TokenLogprobs]:
        """A report on each live beam."""
        async with AsyncExitStack() as stack:
            self._parts = []
            for beam in self._state.live:
                self._parts.append(await stack.enter_async_context(self._room.submit(self._part(beam))))
            return [await self._report(part) for part in self._parts]

    def _part(self, beam: Beam) -> GenerationRequest:
        wanted = self._request.sampling
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=max(self._state.num_alternatives, wanted.logprobs or 0),
            prompt_logprobs=None if beam.tokens else wanted.prompt_logprobs,
        )
        return dataclasses.replace(
            self._request,
            prompt_token_ids=[*self._request.prompt_token_ids, *beam.token_ids],
            sampling=sampling,
            n=1,
            arrival=time.monotonic(),
        )

    async def _report(self, part: GenerationLike) -> TokenLogprobs:
        report: TokenLogprobs | None = None
        async for delta in part:
            if self._first is None:
                self._first = delta
                self._room.first_token()
            if delta.logprobs:
                report = delta.logprobs[0]
        if report is None:
            raise InternalError("The worker ended a step of beam search without a token.")
        return report

    def _deltas(self) -> list[TextDelta]:
        found = self._state.finished[: self._params.num_returned]
        if len(found) < self._params.num_returned:
            raise InternalError("Beam search found fewer hypotheses than were asked for.")
        return [self._delta(index, beam) for index, beam in enumerate(found)]

    def _delta(self, index: int, beam: Beam) -> TextDelta:
        """The delta of a hypothesis, as if a worker had sent it in one piece."""
        token_ids, first = beam.token_ids, self._first
        finish = Finish(FinishReason.LENGTH)
        if token_ids[-1] in self._state.stop_ids:
            finish = Finish(FinishReason.STOP, stop_token_id=token_ids[-1])
        wanted = self._request.sampling.logprobs
        output = Output(
            self._request.request_id,
            index,
            token_ids,
            finish,
            None if wanted is None else [_cut(token, wanted) for token in beam.tokens],
            None if first is None else first.num_cached_tokens,
            None if first is None or index else first.prompt_logprobs,
        )
        return self._choices[index].advance(output, self._vocab_size)


def _cut(token: TokenLogprobs, wanted: int) -> TokenLogprobs:
    return msgspec.structs.replace(token, top_ids=token.top_ids[:wanted], top_logprobs=token.top_logprobs[:wanted])
