"""Beam search on top of workers that do not implement it.

Each step sends the live beams as requests for one token and reads the likeliest tokens from the report. The workers'
prefix cache makes this cheap, because all but the newest tokens of a beam are cached. If the cache is small, the beams
of a step run in groups (flow.beam_state).
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec

from gateway.flow.beam_state import Beam, BeamPages, BeamParams, BeamState, BeamText
from gateway.flow.choice import Choice, EmbeddingChoice, choices_of, detokenizer_of, scanners_of
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.generation import Generator, Reservation
from gateway.flow.outbox import Receiver
from gateway.flow.requests import RunningRequest
from gateway.text.pipeline import TextPipeline
from shared.errors import InternalError, InvalidRequestError, PeltonError, UnavailableError
from shared.messages import Finish, FinishReason, Output, TokenLogprobs, WorkerFacts
from shared.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAM_TOKENS = 131_072
"""Maximum number of tokens of all beams of a prompt.

In each step the worker looks up every beam's pages while other requests wait.
"""


def start_beam_search(
    generator: Generator, params: BeamParams, pipeline: TextPipeline, facts: WorkerFacts, request: GenerationRequest
) -> BeamSearch:
    """Start a search that answers a request with the best hypotheses. Raises the errors of Generator.submit.

    Args:
        generator: Generator that runs the steps.
        params: Parameters of the search.
        pipeline: Text pipeline of the model.
        facts: Facts of the model.
        request: The request.
    """
    sampling = request.sampling
    num_prompt_tokens = len(request.prompt_token_ids)
    state = _initial_state(params, pipeline, facts, request)
    width = params.width
    param = "n" if width == params.num_returned else "best_of"
    excess = state.num_alternatives - MAX_LOGPROBS
    if excess > 0:
        raise InvalidRequestError(
            f"Beam search supports at most {width - excess} beams with this model's end-of-text tokens and these "
            f"stop_token_ids, got {width}.",
            param=param,
        )
    num_tokens = width * (num_prompt_tokens + sampling.max_tokens)
    if num_tokens > MAX_BEAM_TOKENS:
        raise InvalidRequestError(
            f"{width} beams of a prompt of {num_prompt_tokens} tokens and max_tokens = {sampling.max_tokens} have "
            f"{num_tokens} tokens; beam search supports at most {MAX_BEAM_TOKENS}.",
            param=param,
        )
    pages = BeamPages(
        num_pages=facts.num_pages,
        page_size=facts.page_size,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=sampling.max_tokens,
        width=width,
        param=param,
    )
    choices = choices_of(request, pipeline)
    if request.deadline is None:
        # The client sees nothing before the end, so the whole search counts as waiting for the first token.
        request = dataclasses.replace(request, deadline=time.time() + generator.request_timeout)
    # Reserve last: from here on the search must exist to release the room.
    room = generator.reserve(dataclasses.replace(request, n=width))
    return BeamSearch(room, request, params, state, pages, choices, facts.vocab_size)


def _initial_state(
    params: BeamParams, pipeline: TextPipeline, facts: WorkerFacts, request: GenerationRequest
) -> BeamState:
    sampling = request.sampling
    new_scanner = scanners_of(request)
    if new_scanner is not None and request.format is not None and request.format.new_splitter is not None:
        # Stop strings do not apply to reasoning.
        param = "stop_regex" if request.stop_regex else "stop"
        raise InvalidRequestError(
            f"{param} cannot be combined with use_beam_search when the model reasons. Leave out {param}.",
            param=param,
        )
    eos_token_ids = frozenset(facts.eos_token_ids)
    return BeamState(
        params,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids),
        masked_ids=eos_token_ids - set(sampling.stop_token_ids) if sampling.ignore_eos else (),
        text=new_scanner and BeamText(detokenizer_of(request, pipeline), new_scanner()),
    )


@dataclass(eq=False)
class BeamSearch(RunningRequest):
    """Running search; see RunningRequest. All deltas arrive at the end, one per choice."""

    _room: Reservation
    _request: GenerationRequest
    _params: BeamParams
    _state: BeamState
    _pages: BeamPages
    _choices: Sequence[Choice | EmbeddingChoice]
    _vocab_size: int
    _parts: list[RunningRequest] = field(default_factory=list)
    _first: TextDelta | None = None
    _results: deque[TextDelta] | None = None

    def close(self) -> None:
        """Cancel running steps and release the room. Idempotent."""
        for part in self._parts:
            part.close()
        self._room.close()

    def pass_to(self, receiver: Receiver) -> None:
        """Do nothing, because nothing arrives before the ends; see RunningRequest."""

    async def __anext__(self) -> TextDelta:
        if self._results is None:
            try:
                while not self._state.done:
                    self._state.advance(await self._step())
            except PeltonError as error:
                self._room.fail(error)
                raise
            found = self._state.finished[: self._params.num_returned]
            if len(found) < self._params.num_returned:
                raise InternalError("Beam search found fewer hypotheses than requested.")
            self._results = deque(self._delta(index, beam) for index, beam in enumerate(found))
            self._room.complete(list(self._results))
        if not self._results:
            raise StopAsyncIteration
        return self._results.popleft()

    async def _step(self) -> list[TokenLogprobs]:
        """Return a report on each live beam."""
        live = self._state.live
        reports: dict[int, TokenLogprobs] = {}
        for group in self._pages.groups(live):
            reports.update(zip(group, await self._run([live[index] for index in group]), strict=True))
        return [reports[index] for index in range(len(live))]

    async def _run(self, beams: Sequence[Beam]) -> list[TokenLogprobs]:
        """Run one request per beam concurrently and return their reports."""
        if self._request.deadline is not None and time.time() >= self._request.deadline:
            raise UnavailableError(
                "Beam search took longer than the server's request timeout. Ask for fewer beams or tokens.",
                code="request_timeout",
            )
        async with AsyncExitStack() as stack:
            self._parts = []
            for beam in beams:
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
            stop=(),
            stop_regex=(),
            format=None,
            speculative=False,
            arrival=time.monotonic(),
        )

    async def _report(self, part: RunningRequest) -> TokenLogprobs:
        report: TokenLogprobs | None = None
        async for delta in part:
            if self._first is None:
                self._first = delta
                self._room.first_token()
            if delta.num_cached_tokens is not None:
                self._pages.count(delta.num_cached_tokens)
            if delta.logprobs:
                report = delta.logprobs[0]
        if report is None:
            raise InternalError("The worker ended a step of beam search without a token.")
        return report

    def _delta(self, index: int, beam: Beam) -> TextDelta:
        """Return the delta of a hypothesis, as if a worker had sent it in one piece."""
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
