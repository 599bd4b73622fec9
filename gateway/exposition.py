"""What GET /metrics shows: each worker once, and what the gateway processes count, apart where there are several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.siblings import Peers
from shared.log import get_logger

log = get_logger("gateway.exposition")


class Exposition:
    """Renders the metrics.

    Args:
        counted: what this process counts.
        workers: what the workers report.
        peers: the other processes; None where there is one.
    """

    def __init__(self, counted: CollectorRegistry, workers: CollectorRegistry, peers: Peers | None = None) -> None:
        self._counted = counted
        self._workers = workers
        self._peers = peers

    async def render(self) -> bytes:
        """Prometheus' text format."""
        counted = generate_latest(self._counted) if self._peers is None else labelled(await self._peers.metrics())
        return counted + generate_latest(self._workers)


class _Labelled(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def labelled(texts: Mapping[int, bytes]) -> bytes:
    """The expositions of several processes as one, each sample with its process in the label `gateway`.

    What one says that is no exposition is left out: the others are shown without it.

    Sums would not do: when a process dies its counts are gone, and a sum that falls looks like a counter that began
    anew and has all of the others' counts since then.
    """
    families: dict[str, Metric] = {}
    for index, text in sorted(texts.items()):
        try:
            parsed = list(text_string_to_metric_families(text.decode()))
        except ValueError as error:
            log.warning("a gateway's metrics cannot be read", gateway=index, error=type(error).__name__)
            continue
        for family in parsed:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "gateway": str(index)}, sample.value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Labelled(families.values()))
    return generate_latest(registry)
