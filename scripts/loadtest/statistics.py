"""Figures of a load computed from its records. Latencies are in milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from scripts.loadtest.coordinator import LoadResult
from scripts.loadtest.records import LoadRequest, Record

Bound = Literal["ttft", "tpot", "itl", "e2el"]


class GoodputError(ValueError):
    """Invalid goodput bound."""


def parse_goodput(bounds: Sequence[str]) -> dict[Bound, float]:
    """Parse bounds like `ttft:500`, in milliseconds.

    Raises:
        GoodputError: A name is unknown, or a bound is not a positive number.
    """
    parsed: dict[Bound, float] = {}
    for text in bounds:
        name, _, value = text.partition(":")
        known = {bound: bound for bound in get_args(Bound)}.get(name)
        if known is None:
            raise GoodputError(f"unknown goodput bound {name!r}; use {', '.join(get_args(Bound))}")
        try:
            parsed[known] = float(value)
        except ValueError:
            raise GoodputError(f"goodput bound {text!r} must be a number of milliseconds, as in {name}:500") from None
        if not parsed[known] > 0:
            raise GoodputError(f"goodput bound {text!r} must be greater than 0")
    return parsed


def ttft(record: Record) -> float | None:
    """Return the milliseconds from sending to the first frame with text; None without such a frame."""
    return (record.frame_times[0] - record.sent) * 1e3 if record.frame_times else None


def tpot(record: Record) -> float | None:
    """Return the milliseconds per output token after the first one; None for fewer than two tokens."""
    if record.output_tokens < 2 or not record.frame_times:
        return None
    return (record.frame_times[-1] - record.frame_times[0]) * 1e3 / (record.output_tokens - 1)


def inter_frame(record: Record) -> list[float]:
    """Return the milliseconds between frames with text, the inter-token latency if a frame has one token."""
    return [(b - a) * 1e3 for a, b in zip(record.frame_times, record.frame_times[1:])]


def e2el(record: Record) -> float:
    """Return the milliseconds from sending to the end of the stream."""
    return (record.done - record.sent) * 1e3


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a sample; all None if it is empty."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    maximum: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Compute the figures; percentiles interpolate linearly."""
        if not values:
            return cls(0)
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(len(values), float(np.mean(values)), p50, p90, p99, float(max(values)))


@dataclass(frozen=True)
class Summary:
    """Figures of a load. Rates are over `seconds`, the time from the first send to the last end."""

    num_requests: int
    num_completed: int
    num_not_sent: int
    interrupted: bool
    seconds: float
    errors: dict[str, int]
    error_examples: dict[str, str]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    frames_per_token: float | None
    max_concurrency_seen: int
    tokens_from_usage: bool
    goodput_bounds: dict[Bound, float]
    goodput_requests_per_second: float | None
    goodput_share: float | None
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    prompt_length_error: Distribution  # actual minus intended tokens of synthetic prompts
    schedule_lag: Distribution  # ms from due time to sending: the delay of the client
    limit_wait: Distribution  # ms from arrival to due time: the delay by the concurrency limit
    client_cpu_share: float
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as dictionaries."""
        return asdict(self)


def summarize(requests: Sequence[LoadRequest], result: LoadResult, bounds: Mapping[Bound, float]) -> Summary:
    """Compute the figures of a load. Latencies cover completed requests; tokens of failed requests count too."""
    by_index = {request.index: request for request in requests}
    records = result.records
    good = [record for record in records if record.error is None]
    errors = Counter(record.error for record in records if record.error is not None)
    began = min((record.sent for record in records), default=result.start)
    seconds = max(1e-9, max((record.done for record in records), default=result.end) - began)
    output_tokens = sum(record.output_tokens for record in records)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in good)
    frames = sum(len(record.frame_times) for record in good)
    tokens = sum(record.output_tokens for record in good)
    within = sum(1 for record in good if _meets(record, bounds))
    examples: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            examples.setdefault(record.error, record.message)
    return Summary(
        num_requests=len(records),
        num_completed=len(good),
        num_not_sent=result.num_offered - len(records),
        interrupted=result.interrupted,
        seconds=seconds,
        errors=dict(errors.most_common()),
        error_examples=examples,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in good),
        output_tokens=output_tokens,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        frames_per_token=frames / tokens if tokens else None,
        max_concurrency_seen=_peak(records),
        tokens_from_usage=all(record.tokens_from_usage for record in good),
        goodput_bounds=dict(bounds),
        goodput_requests_per_second=within / seconds if bounds else None,
        goodput_share=within / len(records) if bounds and records else None,
        ttft=Distribution.of([value for record in good if (value := ttft(record)) is not None]),
        tpot=Distribution.of([value for record in good if (value := tpot(record)) is not None]),
        itl=Distribution.of([gap for record in good for gap in inter_frame(record)]),
        e2el=Distribution.of([e2el(record) for record in good]),
        prompt_length_error=Distribution.of(_length_errors(good, by_index)),
        schedule_lag=Distribution.of([max(0.0, record.sent - record.due) * 1e3 for record in records]),
        limit_wait=Distribution.of([
            max(0.0, record.due - result.start - by_index[record.index].arrival) * 1e3 for record in records
        ]),
        client_cpu_share=result.cpu_share,
        finish_reasons=dict(Counter(record.finish_reason for record in good if record.finish_reason is not None)),
    )  # fmt: skip


def _meets(record: Record, bounds: Mapping[Bound, float]) -> bool:
    """Return True if a request meets the bounds. A missing figure (one token has no TPOT) meets any bound."""
    gaps = inter_frame(record)
    values: dict[Bound, float | None] = {
        "ttft": ttft(record),
        "tpot": tpot(record),
        "itl": max(gaps) if gaps else None,
        "e2el": e2el(record),
    }
    return all((value := values[name]) is None or value <= bound for name, bound in bounds.items())


def _length_errors(records: Sequence[Record], requests: Mapping[int, LoadRequest]) -> list[float]:
    errors = []
    for record in records:
        wanted = requests[record.index].num_prompt_tokens
        if wanted is not None and record.prompt_tokens is not None:
            errors.append(float(record.prompt_tokens - wanted))
    return errors


def _peak(records: Sequence[Record]) -> int:
    """Return the maximum number of open requests."""
    # At equal times an end sorts before a begin.
    events = sorted([(record.sent, 1) for record in records] + [(record.done, -1) for record in records])
    open_now = peak = 0
    for _, change in events:
        open_now += change
        peak = max(peak, open_now)
    return peak
