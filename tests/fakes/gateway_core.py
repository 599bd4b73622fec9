"""Gateway core with fake workers: registry, admission, router and generator with short timeouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.cluster.client import Liveness
from gateway.cluster.registry import Registry
from gateway.flow.admission import Admission
from gateway.flow.events import GenerationRequest, TextDelta
from gateway.flow.generation import Generation, Generator
from gateway.flow.routing import Router
from gateway.text.pipeline import TextThreads
from shared.metrics import GatewayMetrics
from shared.sampling_params import SamplingParams
from tests.fakes.fake_worker import FakeWorker

FAST = Liveness(ping_interval=0.05, not_ready_after=1.5, lost_after=3.0)
"""Timeouts for workers that shall be lost through silence."""
_PATIENT = Liveness(ping_interval=0.05, not_ready_after=30.0, lost_after=50.0)
"""Timeouts for all other workers: on a busy machine a worker may be silent for seconds."""


@dataclass
class Core:
    registry: Registry
    admission: Admission
    generator: Generator
    metrics: CollectorRegistry

    def sample(self, name: str, **labels: str) -> float:
        """Return the value of a metric, or 0 if it has none."""
        return self.metrics.get_sample_value(f"pelton:{name}", labels) or 0.0


@asynccontextmanager
async def running_core(directory: Path, **options: Any) -> AsyncIterator[Core]:
    """Run the core; `options` override the limits below."""
    threads = TextThreads()
    gateway_id = options.get("gateway_id", "gw-1")
    collected = CollectorRegistry()
    metrics = GatewayMetrics(collected)
    registry = Registry(
        metrics=metrics,
        directory=directory,
        gateway_id=gateway_id,
        threads=threads,
        liveness=options.get("liveness", _PATIENT),
        scan_interval=0.02,
    )
    admission = Admission(
        max_waiting_requests=options.get("max_waiting_requests", 64),
        max_waiting_tokens=options.get("max_waiting_tokens", 100_000),
        clock=time.monotonic,
    )
    generator = Generator(
        registry,
        admission,
        Router(),
        gateway_id=gateway_id,
        request_timeout=options.get("request_timeout", 50.0),
        write_timeout=options.get("write_timeout", 50.0),
        metrics=metrics,
    )
    await registry.start()
    try:
        yield Core(registry, admission, generator, collected)
    finally:
        await registry.close()
        threads.close()


async def joined(core: Core, workers: int = 1) -> None:
    """Wait until the first model has this number of ready workers."""
    await until(lambda: core.registry.models() and len(core.registry.models()[0].ready_workers()) == workers)


@asynccontextmanager
async def linked(
    directory: Path, options: dict[str, Any] | None = None, **worker: Any
) -> AsyncIterator[tuple[Core, FakeWorker]]:
    """Run a core with these options and a FakeWorker with these fields, and wait until the worker has joined."""
    with FakeWorker(directory, **worker) as running:
        async with running_core(directory, **(options or {})) as core:
            await joined(core)
            yield core, running


def ids_of(deltas: Iterable[TextDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def until(condition: Callable[[], object], seconds: float = 40.0) -> None:
    """Wait until the condition is true; fail the test on timeout."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        await asyncio.sleep(0.005)


def make_request(ids: list[int], *, max_tokens: int = 64, **changes: Any) -> GenerationRequest:
    """Return a request to the model "fake"."""
    sampling = changes.pop("sampling", SamplingParams(max_tokens=max_tokens))
    fields: dict[str, Any] = {"request_id": "request", "model": "fake", **changes}
    return GenerationRequest(prompt_token_ids=ids, sampling=sampling, **fields)


async def collect(generation: Generation) -> list[TextDelta]:
    """Return all deltas, in order."""
    async with generation:
        return [delta async for delta in generation]


def text_of(deltas: list[TextDelta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)
