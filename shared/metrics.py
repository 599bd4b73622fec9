"""All metrics, with their names, labels and documentation. Metrics that mean the same as vLLM's have vLLM's names.

GatewayMetrics holds what the gateway counts itself. Counters of a worker arrive in WorkerStats with each Pong, and
WorkerCollector exports the last report of each worker. Labels are bounded: model names come from workers, never from
requests, and every other label is from a fixed set in the code.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from shared.messages import WorkerStats

PREFIX = "pelton:"

_SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_LONG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

WORKER_COUNTERS = {
    "prompt_tokens": "prompt tokens of started requests, including cached ones",
    "generation_tokens": "tokens generated",
    "prefix_cache_queries": "prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "prompt tokens found in the prefix cache",
    "prefix_cache_evictions": "cached pages that were reused for other content",
    "num_preemptions": "requests whose pages were taken away and that are recomputed later",
    "spec_decode_num_drafts": "verifications of drafted tokens, one per choice and step",
    "spec_decode_num_draft_tokens": "drafted tokens that the model verified",
    "spec_decode_num_accepted_tokens": "drafted tokens that the model accepted",
    "spec_decode_draft_seconds": "seconds of computation of the draft model",
    "engine_steps": "steps of the engine",
    "step_tokens": "tokens computed by the steps, of prompts and outputs",
    "discarded_tokens": "tokens sampled for requests that had already ended",
    "invalid_logits": "requests that failed because their logits were not finite",
    "rejected_requests": "requests that the worker refused as invalid",
    "malformed_messages": "messages from gateways that a worker dropped",
    "gateways_dropped": "gateways that stopped sending or did not read their messages",
    "grammar_compilations": "grammars compiled or abandoned",
    "grammar_cache_hits": "choices whose grammar was already compiled",
    "grammar_compile_seconds": "seconds of threads that compiled grammars",
}
"""Keys of WorkerStats.counters without the suffix `_total`. Other keys are not exported."""

ACCEPTED_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
"""Metric of WorkerStats.accepted_per_position, with the label `position` from 0."""


class TokenHistogram(Collector):
    """Histogram for values of each token. prometheus_client's own takes a lock and 2 us per observation.

    For one thread. Registers itself.
    """

    def __init__(self, name: str, doc: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._doc = doc
        self._bounds = tuple(buckets)
        self._series: dict[str, TokenSeries] = {}
        registry.register(self)

    def labels(self, model_name: str) -> TokenSeries:
        """Return the series of one model."""
        return self._series.setdefault(model_name, TokenSeries(self._bounds))

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family."""
        family = HistogramMetricFamily(self._name, self._doc, labels=["model_name"])
        for model_name, series in self._series.items():
            family.add_metric([model_name], *series.totals())
        yield family


class TokenSeries:
    """One series of a TokenHistogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Count a value `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def totals(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative counts by upper bound, and the sum of all values."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self._counts)))), self._sum


class GatewayMetrics:
    """Metrics that the gateway counts itself. One object per registry; attributes are prometheus_client metrics.

    `model_name` is the canonical name of a model that a worker serves. Each accepted request increments exactly one of
    request_success (by finished_reason) and request_failures (by reason).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, doc, labels, registry=registry)

        def gauge(name: str, doc: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, doc, labels, registry=registry)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, doc, ["model_name"], registry=registry, buckets=buckets)

        self.requests_accepted = counter("requests_accepted", "requests passed to a worker", "model_name")
        self.request_success = counter(
            "request_success", "requests that succeeded, by finish reason", "model_name", "finished_reason"
        )
        self.request_failures = counter(
            "request_failures", "accepted requests that failed: abort, error, worker_lost", "model_name", "reason"
        )
        self.requests_rejected = counter("requests_rejected", "requests not accepted, by error code", "code")
        self.http_requests = counter("http_requests", "HTTP responses, by route and status", "route", "status")
        self.http_requests_in_flight = gauge("http_requests_in_flight", "HTTP requests whose response is not complete")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "seconds from the request's arrival to its first token", _LONG_BUCKETS
        )
        self.inter_token_latency = TokenHistogram(
            PREFIX + "inter_token_latency_seconds",
            "seconds between two outputs of a choice, per token",
            _SHORT_BUCKETS,
            registry,
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "a request's mean seconds per token after the first",
            _SHORT_BUCKETS,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "seconds from the request's arrival to its end", _LONG_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "seconds from the request's arrival until it was sent to a worker",
            _LONG_BUCKETS,
        )
        self.workers_lost = counter("workers_lost", "workers that died or stopped answering")
        self.slow_clients = counter("slow_clients", "streams that were cut because the client did not read")
        self.wire_errors = counter("gateway_wire_errors", "messages from workers that were malformed or missing")
        self.event_loop_lag = gauge("event_loop_lag_seconds", "delay of the event loop's last timer in seconds")
        self.log_lines_dropped = gauge("log_lines_dropped", "log lines lost because they were not read in time")


@dataclasses.dataclass(frozen=True)
class WorkerSnapshot:
    """Last known state of one worker. `worker` is its index, or its endpoint if it has none."""

    model_name: str
    worker: str
    ready: bool
    num_pages: int
    stats: WorkerStats

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that live requests hold."""
        return self.stats.pages_in_use / self.num_pages if self.num_pages else 0.0


WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerSnapshot], float]]] = {
    "num_requests_running": ("choices that the worker is running", lambda worker: worker.stats.num_running),
    "num_requests_waiting": ("choices that are waiting for the worker", lambda worker: worker.stats.num_waiting),
    "num_waiting_tokens": ("prompt tokens not yet computed", lambda worker: worker.stats.num_waiting_tokens),
    "kv_cache_usage_perc": (
        "share of the KV cache's pages that live requests hold, 0 to 1",
        lambda worker: worker.kv_cache_usage,
    ),
    "kv_cache_num_cached_pages": (
        "pages that no request holds but that later requests may reuse",
        lambda worker: worker.stats.num_cached_pages,
    ),
    "kv_cache_num_pages": ("pages of the KV cache", lambda worker: worker.num_pages),
    "worker_ready": ("1 if the worker answers in time, else 0", lambda worker: float(worker.ready)),
}
"""Documentation and value of each gauge."""


class WorkerCollector(Collector):
    """Collector that exports each worker's last report at each scrape; register it with `registry.register`.

    Args:
        snapshots: Function that returns the connected workers, each once.
    """

    def __init__(self, snapshots: Callable[[], Iterable[WorkerSnapshot]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name, with a sample per worker."""
        snapshots = list(self._snapshots())
        labels = ["model_name", "worker"]
        for name, (doc, value_of) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, doc, labels=labels)
            for snapshot in snapshots:
                gauge.add_metric([snapshot.model_name, snapshot.worker], value_of(snapshot))
            yield gauge
        for name, doc in WORKER_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, doc, labels=labels)
            for snapshot in snapshots:
                value = snapshot.stats.counters.get(f"{name}_total", 0.0)
                counter.add_metric([snapshot.model_name, snapshot.worker], value)
            yield counter
        doc = "accepted drafts by position in the draft"
        accepted = CounterMetricFamily(PREFIX + ACCEPTED_PER_POSITION, doc, labels=[*labels, "position"])
        for snapshot in snapshots:
            for position, count in enumerate(snapshot.stats.accepted_per_position):
                accepted.add_metric([snapshot.model_name, snapshot.worker, str(position)], count)
        yield accepted
