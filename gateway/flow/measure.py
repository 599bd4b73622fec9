"""Metrics of requests, counted once per request when its outcome is decided."""

from __future__ import annotations

import time

from shared.errors import PeltonError, WorkerLostError
from shared.metrics import GatewayMetrics


class ModelMeasures:
    """Metrics of one model with the label resolved once."""

    def __init__(self, metrics: GatewayMetrics, model_name: str) -> None:
        self.accepted = metrics.requests_accepted.labels(model_name)
        self.success = {reason: metrics.request_success.labels(model_name, reason) for reason in ("stop", "length")}
        self.failures = {
            reason: metrics.request_failures.labels(model_name, reason) for reason in ("abort", "error", "worker_lost")
        }
        self.time_to_first_token = metrics.time_to_first_token.labels(model_name)
        self.inter_token_latency = metrics.inter_token_latency.labels(model_name)
        self.time_per_output_token = metrics.time_per_output_token.labels(model_name)
        self.e2e_latency = metrics.e2e_latency.labels(model_name)
        self.queue_time = metrics.queue_time.labels(model_name)
        self.slow_clients = metrics.slow_clients


class Measure:
    """Timer of one accepted request. `end` counts it as exactly one of success, failure and abort.

    Args:
        metrics: Metrics of the model.
        arrival: Arrival of the request, by time.monotonic.
    """

    __slots__ = ("_arrival", "_ended", "_first", "_last", "_measures", "_num_tokens", "_was_cut")

    def __init__(self, measures: ModelMeasures, arrival: float, num_choices: int) -> None:
        self._measures = measures
        self._arrival = arrival
        self._first: float | None = None
        self._last: list[float] = [0.0] * num_choices
        self._num_tokens = 0
        self._was_cut = False
        self._ended = False

    def sent(self) -> None:
        """Record that a worker has the request."""
        self._measures.accepted.inc()
        self._measures.queue_time.observe(time.monotonic() - self._arrival)

    def output(self, now: float, choice: int, num_tokens: int, finish_reason: str | None) -> None:
        """Record an output of a choice at `now` (time.monotonic)."""
        if finish_reason == "length":
            self._was_cut = True
        if num_tokens == 0:
            return
        self._num_tokens += num_tokens
        if self._first is None:
            self._first = now
            self._measures.time_to_first_token.observe(now - self._arrival)
        last = self._last[choice]
        if last:
            self._measures.inter_token_latency.observe((now - last) / num_tokens, num_tokens)
        self._last[choice] = now

    def slow_client(self) -> None:
        """Count a stream that was cut because its client did not read."""
        self._measures.slow_clients.inc()

    def end(self, error: PeltonError | None, *, complete: bool) -> None:
        """Record the end: with an error, complete, or abandoned by the client. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            reason = "worker_lost" if isinstance(error, WorkerLostError) else "error"
            self._measures.failures[reason].inc()
        elif not complete:
            self._measures.failures["abort"].inc()
        else:
            self._measures.success["length" if self._was_cut else "stop"].inc()
            now = max(self._last)
            self._measures.e2e_latency.observe(time.monotonic() - self._arrival)
            if self._first is not None and self._num_tokens > len(self._last):
                per_choice = self._num_tokens / len(self._last)
                self._measures.time_per_output_token.observe((now - self._first) / (per_choice - 1))
