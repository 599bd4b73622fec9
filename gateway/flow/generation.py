"""Life of one request in the gateway, from admission to its last delta.

The worker's link delivers outputs by callbacks, and the route iterates over deltas. An outbox between them holds at
most one delta per choice, into which later ones are merged while the route is busy. However the route leaves the
`async with`, the rest of the request is cancelled at the worker and the permit is released; no other module does this.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry

from gateway.cluster.client import Stream, WorkerLink
from gateway.cluster.registry import ModelEntry, Registry
from gateway.flow.admission import Admission, Permit, Reported, Room
from gateway.flow.choice import choices_of
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.measure import Measure, ModelMeasures
from gateway.flow.outbox import FlushScheduler, Outbox, Receiver
from gateway.flow.requests import RunningRequest
from gateway.flow.routing import Router
from shared.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    PeltonError,
    RateLimitError,
    UnavailableError,
    WorkerLostError,
)
from shared.log import get_logger
from shared.messages import MAX_CHOICES, Finish, FinishReason, Output, Submit, WorkerFacts
from shared.metrics import GatewayMetrics

_MAX_ID_PREFIX = 80
_SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)

log = get_logger("gateway.flow")


class Generator:
    """Entry for requests: validates, admits, routes and sends them.

    Args:
        models: Models and workers.
        admission: Admission control.
        router: Choice of the worker.
        gateway_id: Part of the ids that workers see, so that those of two gateways differ.
        request_timeout: Seconds that a request may go without any token.
        write_timeout: Seconds that a full outbox may remain unread.
        metrics: Metrics of requests; None for no metrics.
    """

    def __init__(
        self,
        models: Registry,
        admission: Admission,
        router: Router,
        *,
        gateway_id: str,
        request_timeout: float,
        write_timeout: float,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self._models = models
        self._admission = admission
        self._router = router
        self._gateway_id = gateway_id
        self.request_timeout = request_timeout
        self.write_timeout = write_timeout
        self._metrics = metrics or GatewayMetrics(CollectorRegistry())
        self._measures: dict[str, ModelMeasures] = {}
        # For the parts of a request that is measured as one.
        self.discarded_measures = ModelMeasures(GatewayMetrics(CollectorRegistry()), "")
        self._numbers = itertools.count(1)
        self.flush_scheduler = FlushScheduler()

    def submit(self, request: GenerationRequest) -> Generation:
        """Admit, route and send a request. Enter the result at once.

        Raises:
            ModelNotFoundError: No worker serves the model.
            ContextLengthError: The prompt can never fit.
            InvalidRequestError: The request is invalid.
            RateLimitError: An admission limit is reached.
            UnavailableError: No worker can take the request.
        """
        try:
            entry, permit = self._enter(request)
            try:
                generation = Generation(self, request, entry, permit, self._measure(request, entry))
                generation.send()
            except BaseException:
                permit.release()
                raise
        except PeltonError as error:
            self._metrics.requests_rejected.labels(error.code or error.type).inc()
            raise
        return generation

    def reserve(
        self, request: GenerationRequest, *, num_sequences: int | None = None, num_tokens: int | None = None
    ) -> Reservation:
        """Admit a request that its caller runs in parts. Raises the errors of submit.

        Args:
            request: The whole request.
            num_sequences: Sequences of the parts that run at a time; None for request.n.
            num_tokens: Prompt tokens of these parts; None for the tokens of the request's prompt.
        """
        try:
            entry, permit = self._enter(request, num_sequences, num_tokens)
        except PeltonError as error:
            self._metrics.requests_rejected.labels(error.code or error.type).inc()
            raise
        return Reservation(self, entry, permit, self._measure(request, entry))

    def room(self) -> tuple[Room, Room]:
        """Return the room of running or waiting sequences, and of waiting prompt tokens."""
        return self._admission.room(_reported(self._everyone()))

    def _enter(
        self, request: GenerationRequest, num_sequences: int | None = None, num_tokens: int | None = None
    ) -> tuple[ModelEntry, Permit]:
        entry = self._models.model(request.model)
        if not 1 <= request.n <= MAX_CHOICES:
            raise InvalidRequestError(f"n must be in [1, {MAX_CHOICES}], got {request.n}", param="n")
        check_context(request, entry.facts)
        if not entry.ready_workers():
            raise UnavailableError("No worker of the model answers at the moment. Try again later.")
        everyone = self._everyone()  # the limits hold over all models
        try:
            return entry, self._admission.admit(
                _reported(everyone),
                num_sequences=num_sequences or request.n,
                num_tokens=num_tokens or len(request.prompt_token_ids),
            )
        except RateLimitError:
            for worker in everyone:
                if worker.foreign_sequences or worker.foreign_tokens:
                    worker.refresh()  # requests of other gateways may have ended
            raise

    def _everyone(self) -> list[WorkerLink]:
        return [worker for one in self._models.models() for worker in one.ready_workers()]

    def _measure(self, request: GenerationRequest, entry: ModelEntry) -> Measure:
        name = entry.facts.model_names[0]
        if name not in self._measures:
            self._measures[name] = ModelMeasures(self._metrics, name)
        return Measure(self._measures[name], request.arrival, request.n)

    def dispatch(self, request: GenerationRequest, entry: ModelEntry, stream: Stream) -> tuple[WorkerLink, str]:
        """Send a request to the best worker that accepts it; return the link and the request's id there.

        Raises:
            UnavailableError: No worker accepts it.
        """
        workers = entry.ready_workers()
        # Each attempt has a new id, so that late outputs of an earlier one are ignored.
        request_id = f"{request.request_id[:_MAX_ID_PREFIX]}.{self._gateway_id}.{next(self._numbers)}"
        message = _submit_message(request, request_id, entry.facts.model_names[0], self.request_timeout)
        error = UnavailableError("No worker of the model answers at the moment. Try again later.")
        # A mean is computed from the first token whatever is cached, and its pages are not kept.
        cacheable = [] if request.pooling == "mean" else request.prompt_token_ids
        while workers:
            worker = self._router.choose(workers, cacheable, request.salt, request.affinity)
            try:
                worker.submit(message, stream)
            except UnavailableError as refusal:
                error = refusal
                workers.remove(worker)
            else:
                return worker, request_id
        raise error


class Generation(RunningRequest):
    """Running request: `async with generator.submit(request) as generation: async for delta in generation`.

    Each choice ends with exactly one delta that has a finish_reason, or the iteration raises a PeltonError. Deltas
    before a failure are still delivered.
    """

    def __init__(
        self,
        generator: Generator,
        request: GenerationRequest,
        entry: ModelEntry,
        permit: Permit | None,
        measure: Measure,
    ) -> None:
        self.request = request
        # Callbacks run outside the route's task, whose log lines carry the request's id by themselves.
        self._log_fields = {**structlog.contextvars.get_contextvars(), "generation": request.request_id}
        self._generator = generator
        self._entry = entry
        self._vocab_size = entry.facts.vocab_size
        # None for a part of a request that is admitted as a whole.
        self._permit = permit
        self._choices = choices_of(request, entry.pipeline)
        self._num_unfinished = request.n
        self._measure = measure
        self._outbox = Outbox(generator.write_timeout, self._on_slow_consumer, generator.flush_scheduler)
        self._error: PeltonError | None = None
        self._worker: WorkerLink | None = None
        self._worker_request_id = ""
        self._started = False
        self._attempts = 0
        self._closed = False
        self._last_progress = time.monotonic()
        self._watchdog: asyncio.TimerHandle | None = None

    async def __anext__(self) -> TextDelta:
        while True:
            delta = self._outbox.take()
            if delta is not None:
                return delta
            if self._error is not None:
                raise self._error.untouched()
            if self._num_unfinished == 0 or self._closed:
                raise StopAsyncIteration
            await self._outbox.news()

    def pass_to(self, receiver: Receiver) -> None:
        """See RunningRequest."""
        self._outbox.receiver = receiver

    def close(self) -> None:
        """Cancel the rest at the worker and release the permit. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._measure.end(self._error, complete=self._num_unfinished == 0)
        self._leave_worker()
        self._outbox.close()
        if self._permit is not None:
            self._permit.release()

    def send(self) -> None:
        """Send the request to a worker. Raises UnavailableError."""
        self._attempts += 1
        self._worker, self._worker_request_id = self._generator.dispatch(self.request, self._entry, self)
        if self._watchdog is None:
            self._last_progress = time.monotonic()
            self._measure.sent()
            self._watch()

    def on_output(self, output: Output) -> None:
        """Handle an output of the worker. A failure here ends this request only, not the worker's other requests."""
        if self._closed or self._error is not None:
            return
        try:
            self._take(output)
        except PeltonError as error:
            self._fail(error)
        except Exception:
            log.exception("output_not_handled", **self._log_fields)
            self._fail(InternalError("The server failed. Its log has the details under the request id."))

    def on_lost(self, error: WorkerLostError) -> None:
        """Handle the loss of the worker. A request without output is sent to another one, once."""
        self._worker = None
        if self._closed or self._error is not None:
            return
        if self._started or self._attempts > 1:
            self._fail(error)
            return
        try:
            self.send()
        except PeltonError:
            self._fail(error)
        else:
            log.info("request_moved", **self._log_fields)

    def _take(self, output: Output) -> None:
        if not 0 <= output.choice < len(self._choices):
            raise InternalError("The worker sent output of a choice that was not requested.")
        choice = self._choices[output.choice]
        if choice.finished:
            # Tokens that were on their way when the gateway found a stop string.
            return
        self._last_progress = now = time.monotonic()
        if not self._started:
            self._started = True
            if self._permit is not None:
                self._permit.first_token()
        finish = output.finish
        if finish is not None and finish.reason not in _SUCCESSES:
            raise _failure(finish)
        delta = choice.advance(output, self._vocab_size)
        self._measure.output(now, output.choice, len(delta.token_ids), delta.finish_reason)
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._leave_worker(cancel=finish is None)
            elif finish is None and self._worker is not None:
                self._worker.cancel_choice(self._worker_request_id, output.choice)
        self._outbox.put(delta)

    def _leave_worker(self, *, cancel: bool | None = None) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.forget(self._worker_request_id, cancel=self._num_unfinished > 0 if cancel is None else cancel)
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _fail(self, error: PeltonError) -> None:
        if self._error is None:
            self._error = error.untouched()
            self._leave_worker(cancel=True)
            self._outbox.wake()

    def _on_slow_consumer(self) -> None:
        self._measure.slow_client()
        self._fail(UnavailableError("The client did not read its stream in time.", code="slow_client"))

    def _watch(self) -> None:
        """Fail the request if it has waited too long for a token; otherwise check again when it would have."""
        delay = self._last_progress + self._generator.request_timeout - time.monotonic()
        if self.request.deadline is not None and not self._started:
            delay = min(delay, self.request.deadline - time.time())
        if delay > 0.0:
            self._watchdog = asyncio.get_running_loop().call_later(delay, self._watch)
            return
        what = "next" if self._started else "first"
        self._fail(
            UnavailableError(
                f"The request waited longer than the server's request timeout for its {what} token.",
                code="request_timeout",
            )
        )


@dataclass(eq=False)
class Reservation:
    """Admitted room for a request that its caller runs in parts (beam search, embeddings). It counts as one request."""

    _generator: Generator
    _entry: ModelEntry
    _permit: Permit
    _measure: Measure
    _sent: bool = False

    def submit(self, part: GenerationRequest) -> Generation:
        """Send a part; enter the result at once. Raises the errors of Generator.submit except those of the limits."""
        generator, entry = self._generator, self._entry
        measure = Measure(generator.discarded_measures, part.arrival, part.n)
        generation = Generation(generator, part, entry, None, measure)
        generation.send()
        if not self._sent:
            self._sent = True
            self._measure.sent()
        return generation

    @property
    def tokens_per_second(self) -> float:
        """Recent speed at which the model's workers together compute prompts; 0 while unknown."""
        return sum(worker.stats.prefill_tokens_per_second for worker in self._entry.ready_workers())

    def first_token(self) -> None:
        """Record that the prompt is computed."""
        self._permit.first_token()

    def complete(self, deltas: Sequence[TextDelta]) -> None:
        """Record success, with the last deltas of the choices."""
        now = time.monotonic()
        for delta in deltas:
            self._measure.output(now, delta.choice, len(delta.token_ids), delta.finish_reason)
        self._measure.end(None, complete=True)

    def fail(self, error: PeltonError) -> None:
        """Record failure."""
        self._measure.end(error, complete=False)

    def close(self) -> None:
        """Release the room; idempotent. A request that is not complete by then counts as abandoned by its client."""
        self._measure.end(None, complete=False)
        self._permit.release()


def _reported(workers: Sequence[WorkerLink]) -> Reported:
    return Reported(
        capacity=sum(worker.max_num_seqs for worker in workers),
        foreign_sequences=sum(worker.foreign_sequences for worker in workers),
        foreign_tokens=sum(worker.foreign_tokens for worker in workers),
        tokens_per_second=sum(worker.stats.prefill_tokens_per_second for worker in workers),
    )


def check_context(request: GenerationRequest, facts: WorkerFacts) -> None:
    """Check that a request can ever fit.

    Raises:
        ContextLengthError: The request can never fit; the message has the numbers.
        InvalidRequestError: The prompt is empty.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    embeds = request.pooling is not None
    total = num_prompt_tokens + (0 if embeds else request.sampling.max_tokens)
    for limit, name in (
        (facts.max_model_len, "the model's maximum context length"),
        (facts.num_pages * facts.page_size, "the worker's whole KV cache"),
    ):
        if total > limit and embeds:
            message = f"The input has {num_prompt_tokens} tokens; {name} is {limit} tokens."
            raise ContextLengthError(message, param="input")
        if total > limit:
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens is {request.sampling.max_tokens}, together "
                f"{total}; {name} is {limit} tokens.",
                param="max_tokens" if num_prompt_tokens < limit else "prompt",
            )


def _submit_message(request: GenerationRequest, request_id: str, model: str, timeout: float) -> Submit:
    return Submit(
        request_id=request_id,
        model=model,
        token_ids=request.prompt_token_ids,
        num_prompt_tokens=len(request.prompt_token_ids),
        sampling=request.sampling,
        num_choices=request.n,
        grammar=request.grammar,
        salt=request.salt,
        tenant=request.tenant,
        priority=request.priority,
        deadline=time.time() + timeout if request.deadline is None else request.deadline,
        speculative=request.speculative,
        prediction=request.prediction,
        pooling=request.pooling,
    )


_ERRORS_BY_CODE: dict[str | None, type[PeltonError]] = {
    "context_length_exceeded": ContextLengthError,
    "invalid_request": InvalidRequestError,
    "invalid_grammar": InvalidRequestError,
    "service_unavailable": UnavailableError,
    "worker_lost": WorkerLostError,
    "deadline_exceeded": UnavailableError,
    "model_not_found": ModelNotFoundError,
}


def _failure(finish: Finish) -> PeltonError:
    """Return the error for an unsuccessful end."""
    if finish.reason is FinishReason.ABORT:
        return UnavailableError(finish.message or "The worker ended the request before it was complete.")
    kind = _ERRORS_BY_CODE.get(finish.code, InternalError)
    error = kind(finish.message or "The worker failed to serve the request.", code=finish.code)
    error.param = finish.param
    return error
