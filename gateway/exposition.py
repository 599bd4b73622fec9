"""Contents of GET /metrics: the metrics of all gateway processes, and those of each worker once."""

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
    """Renderer of the metrics.

    Args:
        counted: Metrics of this process.
        workers: Metrics that the workers report.
        peers: The other gateway processes; None if there is only one.
    """

    def __init__(self, counted: CollectorRegistry, workers: CollectorRegistry, peers: Peers | None = None) -> None:
        self._counted = counted
        self._workers = workers
        self._peers = peers

    async def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        counted = generate_latest(self._counted) if self._peers is None else labelled(await self._peers.metrics())
        return counted + generate_latest(self._workers)


class _Labelled(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def labelled(texts: Mapping[int, bytes]) -> bytes:
    """Merge the metrics of several processes, with the index of the process in the label `gateway`.

    Text that cannot be parsed is omitted.

    The samples are not summed: when a process dies, its counts disappear, and Prometheus would take the falling sum
    for a counter that was reset and count the remaining value again.
    """
    families: dict[str, Metric] = {}
    for index, text in sorted(texts.items()):
        try:
            parsed = list(text_string_to_metric_families(text.decode()))
        except ValueError as error:
            log.warning("gateway_metrics_unreadable", gateway=index, error=type(error).__name__)
            continue
        for family in parsed:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "gateway": str(index)}, sample.value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Labelled(families.values()))
    return generate_latest(registry)
