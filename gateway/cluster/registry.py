"""Registry of workers, of the models that they serve, and of the text pipeline of each model.

Workers are found by their sockets in the runtime directory or configured as endpoints. A worker joins when it has
introduced itself and its text bundle is parsed. It leaves when its link is lost. A restarted worker has a new socket
and therefore a new link. One model name stands for one set of weights: a worker that uses a name with other weights or
another tokenizer waits until the workers that hold the name are gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from gateway.cluster.client import LinkCounters, Liveness, WorkerLink
from gateway.text.formats import resolve_formats
from gateway.text.pipeline import TextPipeline, TextThreads
from shared import sockets
from shared.errors import ConfigurationError, ModelNotFoundError, UnavailableError
from shared.log import get_logger
from shared.messages import Bundle, WorkerFacts
from shared.metrics import GatewayMetrics, WorkerSnapshot

SCAN_INTERVAL = 0.25
_MAX_IDLE_PIPELINES = 4
_BUNDLE_RETRY = 5.0

_IDENTITY = ("model_hash", "bundle_hash", "model_names", "tool_call_parser", "reasoning_parser")
"""Facts that all workers of a model share."""

log = get_logger("gateway.cluster")


class ModelEntry:
    """One served model: its names, its facts, its pipeline and its workers.

    Attributes:
        names: All names that clients may use, the canonical one first.
        name: The canonical name.

    Raises:
        ConfigurationError: The worker asks for an unknown format.
    """

    def __init__(self, facts: WorkerFacts, pipeline: TextPipeline) -> None:
        self.pipeline = pipeline
        self.formats = resolve_formats(
            pipeline.template,
            pipeline.added_ids,
            pipeline.special_ids,
            tool_call_parser=facts.tool_call_parser,
            reasoning_parser=facts.reasoning_parser,
        )
        self.names: Sequence[str] = facts.model_names
        self.name = self.names[0]
        self.workers: list[WorkerLink] = []
        self._first_facts = facts

    @property
    def facts(self) -> WorkerFacts:
        """Facts of the worker with the smallest limits, so that a request that fits them fits every worker.

        Speculation is on only if all workers have it.
        """
        facts = [worker.facts for worker in self.workers if worker.facts is not None]
        if not facts:
            return self._first_facts
        least = min(facts, key=lambda one: (min(one.max_model_len, one.num_pages * one.page_size), one.max_model_len))
        if least.speculative_method != "off" and any(one.speculative_method == "off" for one in facts):
            return msgspec.structs.replace(least, speculative_method="off")
        return least

    def ready_workers(self) -> list[WorkerLink]:
        """Return the workers that answered recently."""
        return [worker for worker in self.workers if worker.ready]

    def matches(self, facts: WorkerFacts) -> bool:
        """Return True if a worker with these facts serves the same model."""
        return all(getattr(self._first_facts, name) == getattr(facts, name) for name in _IDENTITY)


class Registry:
    """Workers of one gateway.

    Args:
        directory: Runtime directory to scan; None if endpoints are given.
        endpoints: Endpoints of workers to connect to instead.
        gateway_id: Unique identity of this gateway on the sockets, the same for its whole life.
        liveness: Intervals of the pings.
        on_refused: Called with the reason when a worker cannot be used, unless another one has joined before.
        on_loaded: Called when the tokenizer and template of a model have been parsed, before its workers join.

    Attributes:
        counters: Errors on all links, lost ones included.
    """

    def __init__(
        self,
        *,
        directory: Path | None,
        endpoints: Sequence[str] = (),
        gateway_id: str,
        threads: TextThreads,
        metrics: GatewayMetrics | None = None,
        liveness: Liveness | None = None,
        scan_interval: float = SCAN_INTERVAL,
        on_refused: Callable[[str], None] | None = None,
        on_loaded: Callable[[], None] | None = None,
    ) -> None:
        self._directory = None if endpoints else directory
        self._endpoints = tuple(endpoints)
        self._gateway_id = gateway_id
        self._threads = threads
        self._metrics = metrics
        self._liveness = liveness or Liveness()
        self._scan_interval = scan_interval
        self._on_refused = on_refused
        self._on_loaded = on_loaded
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, WorkerLink] = {}
        self._entries: list[ModelEntry] = []
        # Names served before, to distinguish a model whose workers are down from an unknown one.
        self._known_names: set[str] = set()
        self._pipelines: OrderedDict[str, TextPipeline] = OrderedDict()
        self._parsing: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, tuple[WorkerLink, float]] = {}
        # Reasons by the hash of an unusable bundle, or by the endpoint of a worker with unusable facts or flags. A
        # restarted worker has another endpoint.
        self._refused: dict[str, str] = {}
        self._conflicts: set[str] = set()
        self.counters = LinkCounters()
        self._wire_errors_shown = 0
        self._scanner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the existing workers and keep looking for others."""
        self._scan()
        self._scanner = asyncio.create_task(self._scan_on(), name="worker-scan")

    async def close(self) -> None:
        """Disconnect from all workers. Running requests fail."""
        tasks = [task for task in (self._scanner, *self._parsing.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._scanner = None
        for link in list(self._links.values()):
            link.close()
        self._context.term()

    def model(self, name: str) -> ModelEntry:
        """Return the model with this name.

        Raises:
            UnavailableError: Its workers are gone, or no worker has joined yet.
            ModelNotFoundError: No worker serves it.
        """
        for entry in self._entries:
            if name in entry.names:
                return entry
        if not self._known_names:
            raise UnavailableError(
                "No worker has joined yet. Workers that were just started may still be loading; try again later.",
                retry_after=2.0,
            )
        if name in self._known_names:
            raise UnavailableError("The model has no worker at the moment. Try again later.", retry_after=2.0)
        raise ModelNotFoundError(
            f"The model {name[:200]!r} does not exist. GET /v1/models lists the available models.", param="model"
        )

    def models(self) -> Sequence[ModelEntry]:
        """Return the models that have a worker now."""
        return tuple(self._entries)

    def ready(self) -> tuple[bool, str]:
        """Return whether a worker recently answered a ping through its engine loop, and the reason if not."""
        if any(worker.ready for entry in self._entries for worker in entry.workers):
            return True, "ok"
        if self._entries:
            return False, "no worker answers"
        if self._refused:
            return False, next(iter(self._refused.values()))
        return False, "no worker has joined" if not self._known_names else "all workers are gone"

    def snapshots(self) -> Iterator[WorkerSnapshot]:
        """Return each worker that has joined once, for /metrics."""
        for entry in self._entries:
            for worker in entry.workers:
                num_pages = worker.facts.num_pages if worker.facts is not None else 0
                yield WorkerSnapshot(entry.name, worker.name, worker.ready, num_pages, worker.stats)

    async def _scan_on(self) -> None:
        while True:
            await asyncio.sleep(self._scan_interval)
            try:
                self._scan()
            except Exception:
                log.exception("scan_failed")

    def _scan(self) -> None:
        found = self._endpoints if self._directory is None else sockets.list_worker_endpoints(self._directory)
        for endpoint in found:
            if endpoint not in self._links:
                self._connect(endpoint)
        for endpoint, link in list(self._links.items()):
            if endpoint not in found and link.facts is None:
                # The socket of a worker that ended before it sent anything.
                link.close()
            else:
                self._try_to_join(link)
        self._show_wire_errors()

    def _connect(self, endpoint: str) -> None:
        link = WorkerLink(
            self._context,
            endpoint,
            self._gateway_id,
            liveness=self._liveness,
            counters=self.counters,
            on_welcome=self._try_to_join,
            on_bundle=self._on_bundle,
            on_lost=self._on_lost,
        )
        self._links[endpoint] = link
        try:
            link.start()
        except ConfigurationError as error:
            del self._links[endpoint]
            log.error("worker_not_usable", reason=str(error))

    def _on_lost(self, link: WorkerLink) -> None:
        self._links.pop(link.endpoint, None)
        self._refused.pop(link.endpoint, None)
        if link.facts is not None and link.lost_reason != "closed":
            log.warning("worker_lost", worker=link.name, epoch=link.epoch, reason=link.lost_reason)
            if self._metrics is not None:
                self._metrics.workers_lost.inc()
        for entry in list(self._entries):
            if link in entry.workers:
                entry.workers.remove(link)
                if not entry.workers:
                    self._entries.remove(entry)

    def _try_to_join(self, link: WorkerLink) -> None:
        """Let a worker join if its pipeline is loaded and its names are free; otherwise the next scan tries again."""
        facts = link.facts
        if facts is None or link.lost or facts.bundle_hash in self._refused or link.endpoint in self._refused:
            return
        if any(link in entry.workers for entry in self._entries):
            return
        if not facts.model_names or facts.page_size < 1 or facts.vocab_size < 1:
            self._refuse(link, "its facts are invalid")
            return
        pipeline = self._pipelines.get(facts.bundle_hash)
        if pipeline is None:
            self._ask_for_bundle(link, facts.bundle_hash)
            return
        names = set(facts.model_names)
        for entry in self._entries:
            if entry.matches(facts):
                break
            if names & set(entry.names):
                if link.endpoint not in self._conflicts:
                    self._conflicts.add(link.endpoint)
                    log.error("worker_kept_out", worker=link.name, reason="another model has the name of its model")
                return
        else:
            try:
                entry = ModelEntry(facts, pipeline)
            except ConfigurationError as error:
                self._refuse(link, str(error))
                return
            self._entries.append(entry)
        entry.workers.append(link)
        self._conflicts.discard(link.endpoint)
        self._known_names.update(facts.model_names)
        log.info("worker_joined", worker=link.name, epoch=link.epoch, model=entry.name)

    def _refuse(self, link: WorkerLink, reason: str) -> None:
        self._refused[link.endpoint] = reason
        log.error("worker_not_usable", reason=reason, worker=link.name)
        self._report_refusal(reason)

    def _report_refusal(self, reason: str) -> None:
        if self._on_refused is not None and not self._known_names:
            self._on_refused(reason)

    def _ask_for_bundle(self, link: WorkerLink, bundle_hash: str) -> None:
        if bundle_hash in self._parsing:
            return
        now = asyncio.get_running_loop().time()
        asked = self._asked.get(bundle_hash)
        if asked is not None and not asked[0].lost and now - asked[1] < _BUNDLE_RETRY:
            return
        if link.request_bundle(bundle_hash):
            self._asked[bundle_hash] = (link, now)

    def _on_bundle(self, link: WorkerLink, bundle: Bundle) -> None:
        asked = self._asked.get(bundle.bundle_hash)
        if asked is None or asked[0] is not link or bundle.bundle_hash in self._parsing:
            self.counters.malformed += 1
            return
        del self._asked[bundle.bundle_hash]
        task = asyncio.create_task(self._parse(bundle), name="parse-bundle")
        self._parsing[bundle.bundle_hash] = task
        task.add_done_callback(lambda _: self._parsing.pop(bundle.bundle_hash, None))

    async def _parse(self, bundle: Bundle) -> None:
        try:
            pipeline = await asyncio.to_thread(TextPipeline, bundle, self._threads)
        except ConfigurationError as error:
            self._refused[bundle.bundle_hash] = "the tokenizer of a worker cannot be used"
            log.error("bundle_not_usable", reason=str(error))
            self._report_refusal(str(error))
            return
        self._pipelines[bundle.bundle_hash] = pipeline
        self._drop_idle_pipelines()
        if self._on_loaded is not None:
            self._on_loaded()
        for link in list(self._links.values()):
            self._try_to_join(link)

    def _drop_idle_pipelines(self) -> None:
        in_use = {link.facts.bundle_hash for link in self._links.values() if link.facts is not None}
        idle = [bundle_hash for bundle_hash in self._pipelines if bundle_hash not in in_use]
        for bundle_hash in idle[:-_MAX_IDLE_PIPELINES]:
            del self._pipelines[bundle_hash]

    def _show_wire_errors(self) -> None:
        errors = self.counters.wire_errors
        if self._metrics is not None:
            self._metrics.wire_errors.inc(errors - self._wire_errors_shown)
        self._wire_errors_shown = errors
