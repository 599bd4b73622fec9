"""Generations of one HTTP request, one per prompt, merged into a single stream of events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from gateway.api.common.envelope import Tally
from gateway.api.common.prepared import PreparedRequest
from gateway.flow.beam_search import start_beam_search
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.outbox import Receiver
from gateway.flow.requests import RunningRequest
from gateway.http.app_keys import IDENTITY, REQUEST_ID, SERVICES, log
from shared.errors import InternalError
from shared.messages import TokenLogprobs

_QUEUE_SIZE = 64
_SUCCESSES = ("stop", "length", "tool_calls", "repetition")


class FanIn:
    """Asynchronous context manager and iterator over the events of all generations.

    Entering it submits all requests; leaving it cancels every generation. Iteration yields
    (index, prompt index, delta) with index = prompt_index * n + choice. It ends after every choice has ended
    successfully and raises PeltonError otherwise.

    Args:
        submit: Starts a request, as Generator.submit does.
        requests: One request for each prompt.
        eos_token_ids: End-of-sequence tokens of the model.
        scores_only: True if only the report on the prompts is shown; completions are discarded.
        in_flight: Returns the context in which the generations run; it is entered by the task that runs them.
    """

    __slots__ = (
        "_cached_known", "_eos_token_ids", "_first", "_generations", "_in_flight", "_num_open",
        "_queue", "_requests", "_running", "_scores", "_scores_only", "_submit", "_tasks", "_unfinished", "tally",
    )  # fmt: skip

    def __init__(
        self,
        submit: Callable[[GenerationRequest], RunningRequest],
        requests: Sequence[GenerationRequest],
        eos_token_ids: Collection[int] = (),
        *,
        scores_only: bool = False,
        in_flight: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._submit = submit
        self._in_flight = in_flight
        self._requests = requests
        self._generations: list[RunningRequest] = []
        self._running: AbstractContextManager[None] = nullcontext()
        self._first: AsyncIterator[TextDelta]
        # Only for several prompts: a queue takes 3 KB, and thousands of streams may wait for a token.
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]]
        # One bit per choice.
        self._unfinished = (1 << sum(request.n for request in requests)) - 1
        self._eos_token_ids = eos_token_ids
        self._scores_only = scores_only
        # (prompt index, choice) -> sum and number of its log-probabilities.
        self._scores: dict[tuple[int, int], tuple[float, int]] = {}
        # One bit per prompt whose cached tokens have been counted.
        self._cached_known = 0
        self._num_open = len(requests)
        splits = any(request.format is not None and request.format.new_splitter is not None for request in requests)
        self.tally = Tally(
            sum(len(request.prompt_token_ids) for request in requests), num_reasoning_tokens=0 if splits else None
        )

    async def __aenter__(self) -> Self:
        self._running = self._in_flight()
        self._running.__enter__()
        try:
            for request in self._requests:
                if self._generations:
                    await asyncio.sleep(0)  # stop expressions take some ms to prepare, and there may be 256 prompts
                self._generations.append(self._submit(request))
        except BaseException:
            self._close()
            raise
        if len(self._generations) == 1:
            self._first = aiter(self._generations[0])
        else:
            self._queue = asyncio.Queue(_QUEUE_SIZE)
            self._tasks = [
                asyncio.create_task(self._pump(index, generation)) for index, generation in enumerate(self._generations)
            ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._close()

    def _close(self) -> None:
        """Cancel every generation that has not ended."""
        # Made here: one for the life of each stream would take a kilobyte of thousands of idle streams.
        with ExitStack() as stack:
            stack.push(self._running)
            for generation in self._generations:
                stack.callback(generation.close)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, int, TextDelta]:
        if self._tasks:
            prompt_index, delta = await self._next_of_many()
        else:
            try:
                prompt_index, delta = 0, await self._first.__anext__()
            except StopAsyncIteration:
                self._check_complete()
                raise
        return self.event(prompt_index, delta)

    def pass_to(self, receiver: Receiver) -> None:
        """Pass deltas that arrive while the iteration waits to `receiver`, which calls `event` for each.

        The last delta of a choice is always left to the iteration. Several prompts ignore the receiver.
        """
        if len(self._generations) == 1:
            self._generations[0].pass_to(receiver)

    def event(self, prompt_index: int, delta: TextDelta) -> tuple[int, int, TextDelta]:
        """Count a delta, and return (index, prompt index, delta) as the response shows it."""
        if self._scores_only:
            delta = _without_completion(delta)
        self._count(prompt_index, delta)
        if delta.logprobs and delta.finish_reason in ("stop", "tool_calls"):
            shown = self._without_stop_token(delta.logprobs, self._requests[prompt_index])
            delta = msgspec.structs.replace(delta, logprobs=shown)
        return prompt_index * self._requests[prompt_index].n + delta.choice, prompt_index, delta

    def mean_logprob(self, index: int) -> float:
        """Return the mean log-probability of a choice's tokens, with its stop token; -inf without any token."""
        total, number = self._scores.get(divmod(index, self._requests[0].n), (-math.inf, 1))
        return total / number

    def _without_stop_token(self, logprobs: list[TokenLogprobs], request: GenerationRequest) -> list[TokenLogprobs]:
        """Drop the entry of a stop token that is not shown, so that the joined bytes of all entries are the text."""
        last = logprobs[-1].token_id
        ends = last in request.sampling.stop_token_ids or last in self._eos_token_ids
        return logprobs[:-1] if ends and not request.include_stop_str_in_output else logprobs

    async def _next_of_many(self) -> tuple[int, TextDelta]:
        while self._num_open:
            prompt_index, news = await self._queue.get()
            if isinstance(news, Exception):
                raise news
            if news is not None:
                return prompt_index, news
            self._num_open -= 1
        self._check_complete()
        raise StopAsyncIteration

    async def _pump(self, index: int, generation: RunningRequest) -> None:
        try:
            async for delta in generation:
                await self._queue.put((index, delta))
            await self._queue.put((index, None))
        except Exception as error:  # noqa: BLE001 - the iterating task raises it
            await self._queue.put((index, error))

    def _count(self, prompt_index: int, delta: TextDelta) -> None:
        self.tally.num_completion_tokens += len(delta.token_ids)
        if delta.logprobs:
            total, number = self._scores.get((prompt_index, delta.choice), (0.0, 0))
            total += sum(entry.logprob or 0.0 for entry in delta.logprobs)
            self._scores[prompt_index, delta.choice] = total, number + len(delta.logprobs)
        if delta.num_reasoning_tokens:
            self.tally.num_reasoning_tokens = (self.tally.num_reasoning_tokens or 0) + delta.num_reasoning_tokens
        if delta.num_cached_tokens is not None and not self._cached_known >> prompt_index & 1:
            self._cached_known |= 1 << prompt_index
            self.tally.num_cached_tokens += delta.num_cached_tokens
        if delta.drafts is not None:
            self.tally.num_accepted_tokens += delta.drafts.num_accepted
            self.tally.num_rejected_tokens += delta.drafts.num_rejected
        if delta.finish_reason is not None:
            if delta.finish_reason not in _SUCCESSES:
                raise InternalError("The generation was ended by the server.")
            self._unfinished &= ~(1 << prompt_index * self._requests[0].n + delta.choice)

    def _check_complete(self) -> None:
        if self._unfinished:
            raise InternalError("The generation ended without a finish reason.")


def _without_completion(delta: TextDelta) -> TextDelta:
    """Return only what a delta reports about the prompt."""
    reason = None if delta.finish_reason is None else "length"
    return TextDelta(
        delta.choice,
        "",
        [],
        finish_reason=reason,
        num_cached_tokens=delta.num_cached_tokens,
        prompt_logprobs=delta.prompt_logprobs,
    )


def open_events(request: web.Request, prepared: PreparedRequest) -> FanIn:
    """Return the events of a request, which is submitted when the result is entered.

    While it runs it can be aborted by the id of the response or of the HTTP request.
    """
    options, entry, identifier = prepared.options, prepared.entry, prepared.envelope.identifier
    generator = request.app[SERVICES].generator
    submit: Callable[[GenerationRequest], RunningRequest] = generator.submit
    if options.beams is not None:
        submit = partial(start_beam_search, generator, options.beams, entry.pipeline, entry.facts)
    log.debug("submit", response_id=identifier, prompts=len(prepared.generations), n=options.n)
    names = (identifier, request[REQUEST_ID])
    return FanIn(
        submit,
        prepared.generations,
        entry.facts.eos_token_ids,
        scores_only=options.scores_only,
        in_flight=partial(request.app[SERVICES].drain.named, names, request[IDENTITY].key_hash),
    )
