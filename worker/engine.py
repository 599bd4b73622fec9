"""Engine loop: receives messages, lets the scheduler plan and the executor compute, and sends outputs to the gateways.

It owns no state of requests: requests belong to the scheduler, connections to the transport.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared import messages, notify
from shared.errors import InvalidRequestError, PeltonError, UnavailableError
from shared.log import get_logger
from worker.executor.executor import Executor, StepHandle
from worker.plan import StepPlan
from worker.requests.request import SubmitLimits, validate_submit
from worker.scheduler.scheduler import Scheduler
from worker.transport import BrokenSubmit, Transport

IDLE_WAIT_SECONDS = 1.0
BLOCKED_WAIT_SECONDS = 0.02
STALL_SECONDS = 60.0
"""Seconds of waiting requests without a running step that indicate a fault of the scheduler; the worker then ends and
is restarted.
"""
INTEGRITY_SECONDS = 30.0
"""Idle seconds between two integrity checks of pages and queues."""

log = get_logger("worker.engine")


class StalledError(RuntimeError):
    """Requests wait, but nothing can be computed."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    plan: StepPlan
    handle: StepHandle
    submitted: float


class Engine:
    """Loop of one worker.

    Args:
        transport: Connections to gateways.
        scheduler: Requests.
        executor: Runs plans.
        check_executor: Function that raises ExecutorError if a rank has died; called while idle.
        use_idle_time: Function that does a little work to make later steps faster; returns False if nothing is
            left.
        drain_seconds: Seconds that running requests get to finish after `stop`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        transport: Transport,
        facts: messages.WorkerFacts,
        bundle: messages.Bundle,
        *,
        check_executor: Callable[[], None] = lambda: None,
        use_idle_time: Callable[[], bool] = lambda: False,
        drain_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._transport = transport
        self._facts = facts
        self._bundle = bundle
        self._check_executor = check_executor
        self._use_idle_time = use_idle_time
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._limits = SubmitLimits(tuple(facts.model_names), facts.vocab_size)
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_step_end = self._last_progress = self._last_check = clock()
        self._blocked = False
        self._stop_at: float | None = None
        self._watchdog_interval = notify.watchdog_interval()
        self._next_watchdog = 0.0

    def stop(self, *, now: bool = False) -> None:
        """Accept no new requests and end the loop when the existing ones have finished or their time is up.

        Signal handlers and other threads may call this. A second call, like `now`, does not wait.
        """
        now = now or self._stop_at is not None
        self._stop_at = self._clock() + (0.0 if now else self._drain_seconds)
        self._transport.wake()

    def run(self) -> None:
        """Run until stopped. Raises ExecutorError or StalledError after every request was answered."""
        try:
            while not self._stopped():
                self.step()
            self.scheduler.fail_all("The server is shutting down. Try again.", "service_unavailable")
        except Exception as error:
            log.error("engine_failed", error=f"{type(error).__name__}: {error}")
            self.scheduler.fail_all("The worker that ran this request failed. Try again.", "worker_lost")
            raise
        finally:
            self._transport.send_outputs(self.scheduler.take_outputs())

    def _stopped(self) -> bool:
        return self._stop_at is not None and (not self.scheduler.has_requests or self._clock() >= self._stop_at)

    def step(self) -> None:
        """Run one pass: poll, schedule, execute, apply, emit.

        Up to the executor's depth of steps are in flight. The next step is planned while the last one runs, and a
        result is awaited only if no further step can be submitted.
        """
        self._poll()
        plan = self.scheduler.schedule() if len(self._in_flight) < self._executor.depth else None
        if plan is not None:
            begin = self._clock()
            self._in_flight.append(_StepInFlight(plan, self._executor.submit(plan), begin))
        self._blocked = not self._in_flight
        if self._in_flight and (plan is None or len(self._in_flight) >= self._executor.depth):
            self._await_oldest_step()
        self._transport.send_outputs(self.scheduler.take_outputs())
        self._watch()

    def _poll(self) -> None:
        if not self._in_flight and not self.scheduler.has_requests:
            self._idle()
        elif self._blocked:
            self._transport.wait(BLOCKED_WAIT_SECONDS)
        for identity, message in self._transport.receive():
            self._on_message(identity, message)
        for identity in self._transport.take_lost():
            self.scheduler.abort_owner(identity)

    def _idle(self) -> None:
        self._check_executor()
        if self._clock() - self._last_check > INTEGRITY_SECONDS:
            self.scheduler.check_integrity()
            self._last_check = self._clock()
        if not self._use_idle_time():
            self._transport.wait(min(IDLE_WAIT_SECONDS, self._watchdog_interval or IDLE_WAIT_SECONDS))
        self._last_progress = self._clock()

    def _on_message(self, identity: bytes, message: messages.GatewayMessage | BrokenSubmit) -> None:
        if isinstance(message, messages.Hello):
            self._on_hello(identity, message)
        elif not self._transport.knows(identity):
            # Its lease expired, or it never sent a hello. It will miss its pongs and connect again.
            self.scheduler.counters.malformed_messages_total += 1
        elif isinstance(message, messages.Submit | BrokenSubmit):
            self._on_submit(identity, message)
        elif isinstance(message, messages.Cancel):
            self.scheduler.abort(message.request_id, message.choice, identity)
        elif isinstance(message, messages.Ping):
            self._transport.send(
                identity, messages.Pong(epoch=self._transport.epoch, nonce=message.nonce, stats=self._stats())
            )
        elif isinstance(message, messages.BundleRequest) and message.bundle_hash == self._bundle.bundle_hash:
            self._transport.send(identity, self._bundle)
        else:
            self.scheduler.counters.malformed_messages_total += 1

    def _on_hello(self, identity: bytes, message: messages.Hello) -> None:
        self.scheduler.abort_owner(identity)
        answer = messages.Welcome(version=messages.PROTOCOL_VERSION, epoch=self._transport.epoch, facts=self._facts)
        if message.version == messages.PROTOCOL_VERSION:
            self._transport.welcome(identity, answer)
            return
        # The answer tells it the supported version. Its other messages cannot be understood.
        self.scheduler.counters.malformed_messages_total += 1
        log.warning("protocol_version", theirs=message.version, ours=messages.PROTOCOL_VERSION)
        self._transport.forget(identity)
        self._transport.send(identity, answer)

    def _on_submit(self, identity: bytes, message: messages.Submit | BrokenSubmit) -> None:
        choices = range(message.choice, message.choice + message.num_choices)
        if self.scheduler.is_live(message.request_id, choices, identity):
            # An answer with this id would end the stream that the id belongs to.
            self.scheduler.counters.malformed_messages_total += 1
            return
        try:
            if self._stop_at is not None:
                raise UnavailableError("The server is shutting down. Try again.")
            if isinstance(message, BrokenSubmit):
                raise InvalidRequestError("the request breaks a limit of the protocol between gateway and worker")
            validate_submit(message, self._limits)
            self.scheduler.add(message, identity)
        except PeltonError as error:
            self.scheduler.counters.rejected_requests_total += 1
            finish = messages.Finish(
                messages.FinishReason.ERROR, message=error.message, code=error.code or "invalid_request"
            )
            refusals = [(identity, messages.Output(message.request_id, choice, [], finish)) for choice in choices]
            self._transport.send_outputs(refusals)

    def _stats(self) -> messages.WorkerStats:
        scheduler = self.scheduler
        return messages.WorkerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens(),
            pages_in_use=scheduler.kv.pages_in_use,
            num_cached_pages=scheduler.kv.num_cached,
            prefill_tokens_per_second=scheduler.budget.prefill_tokens_per_second,
            counters=scheduler.counters.as_dict(),
            accepted_per_position=list(scheduler.counters.accepted_per_position),
        )

    def _await_oldest_step(self) -> None:
        """Wait for the oldest step in flight and pass its result to the scheduler."""
        step = self._in_flight.popleft()
        result = step.handle.result()
        end = self._clock()
        # With two steps in flight, a step begins when the previous one ends, not when it is submitted.
        milliseconds = (end - max(step.submitted, self._last_step_end)) * 1000
        self._last_step_end = self._last_progress = end
        self.scheduler.apply(step.plan, result, milliseconds)

    def _watch(self) -> None:
        """Notify systemd's watchdog, unless the loop runs without progress."""
        now = self._clock()
        if not self.scheduler.has_computable:
            self._last_progress = now  # grammars compile, with a time limit of their own
        elif self._blocked and now - self._last_progress > STALL_SECONDS:
            raise StalledError(f"{self.scheduler.num_waiting} requests are waiting and no step is running")
        if self._watchdog_interval is not None and now >= self._next_watchdog:
            notify.watchdog()
            self._next_watchdog = now + self._watchdog_interval / 2
