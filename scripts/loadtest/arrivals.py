"""When each request is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from msgspec.structs import replace

from scripts.loadtest.records import LoadRequest


def timed(requests: Sequence[LoadRequest], speed: float) -> list[LoadRequest]:
    """The trace's own arrivals, `speed` times as fast."""
    return [replace(request, arrival=request.arrival / speed) for request in requests]


def poisson(requests: Sequence[LoadRequest], rate: float, seed: int) -> list[LoadRequest]:
    """Arrivals of a Poisson process of `rate` requests per second; infinity sends all at once.

    Gaps are scaled so that the last request comes at exactly (n - 1) / rate seconds: runs with different seeds
    then offer the same load.
    """
    if math.isinf(rate) or len(requests) < 2:
        return [replace(request, arrival=0.0) for request in requests]
    generator = random.Random(seed)
    gaps = [generator.expovariate(1.0) for _ in requests[1:]]
    scale = (len(requests) - 1) / rate / sum(gaps)
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap * scale)
    return [replace(request, arrival=arrival) for request, arrival in zip(requests, arrivals, strict=True)]
