"""One gateway process: construction, start and orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from gateway.app import FOLLOW_UPS, build_app
from gateway.cluster.registry import SCAN_INTERVAL, Registry
from gateway.flow.admission import Admission
from gateway.flow.generation import Generator
from gateway.flow.routing import Router
from gateway.flow.salt import Salts, load_or_create_secret
from gateway.http.app_keys import Services
from gateway.http.auth import KeyRing, load_keys
from gateway.http.drain import Drain
from gateway.middleware import is_loopback_host
from gateway.server import HttpRunner
from gateway.siblings import Siblings, render_metrics
from gateway.stores.responses import ResponseStore
from gateway.stores.streams import StreamStore
from gateway.text.grammars.checker import GrammarChecker
from gateway.text.pipeline import TextThreads
from shared import notify
from shared.errors import ConfigurationError
from shared.log import LogWriter, get_logger
from shared.metrics import GatewayMetrics, WorkerCollector
from shared.settings import GatewaySettings
from shared.sockets import runtime_dir

_BACKLOG = 2048
_LAG_INTERVAL = 1.0
_TRIM_INTERVAL = 10.0
_STOP_MARGIN = 10.0
_OWN_DESCRIPTORS = 64
"""File descriptors reserved for workers (three each), the log and the event loop."""

log = get_logger("gateway")


class RefusedModelError(ConfigurationError):
    """The workers of this gateway serve a model that it cannot serve."""


class Service:
    """Gateway process that runs until a signal, the end of its supervisor, or a model that it cannot serve.

    An unusable model ends only gateways that a supervisor started, because their workers will not serve another model.
    The operator of a standalone gateway may start other workers at any time.

    Args:
        settings: Settings of the gateway.
        log_writer: Log writer whose count of dropped lines is exported as a metric.
    """

    def __init__(self, settings: GatewaySettings, log_writer: LogWriter) -> None:
        self._settings = settings
        self._log_writer = log_writer
        self._drain = Drain(settings.max_concurrent_requests)
        self._grammars = GrammarChecker()
        self._stop = asyncio.Event()
        self._counted = CollectorRegistry()
        self._metrics = GatewayMetrics(self._counted)
        self._registry: Registry | None = None
        self._siblings: Siblings | None = None
        self._refusal: str | None = None

    async def run(self) -> None:
        """Serve until the process is stopped.

        Raises:
            ConfigurationError: The gateway cannot start.
            RefusedModelError: The model cannot be served.
        """
        settings = self._settings
        runner = HttpRunner(
            self._build(),
            max_header_size=settings.max_header_size,
            header_timeout=settings.body_timeout,
            write_timeout=settings.write_timeout,
            max_connections=_max_connections(),
        )
        await runner.setup()
        try:
            self._watch_for_shutdown()
            await self._wait_for_worker()
            if not self._stop.is_set():
                await self._listen(runner)
                url = _url(runner)
                log.info("listening", url=url)
                notify.ready(f"listening on {url}")
            await self._stop.wait()
            await self._wind_down()
        finally:
            await runner.cleanup()
        if self._refusal is not None:
            raise RefusedModelError(f"the model cannot be served: {self._refusal}")

    def _refuse_model(self, reason: str) -> None:
        self._refusal = reason
        self._stop.set()

    def _build(self) -> web.Application:
        settings = self._settings
        directory = runtime_dir(settings.runtime_dir)
        secret = settings.cache_secret.encode() if settings.cache_secret else load_or_create_secret(directory)
        key_ring = KeyRing(load_keys(settings))
        loopback = is_loopback_host(settings.host) or is_loopback_host(f"[{settings.host}]")
        if key_ring.empty and not loopback:
            log.warning("no_api_keys", host=settings.host)
        gateway_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        threads = TextThreads()
        registry = self._registry = Registry(
            directory=None if settings.worker else directory,
            endpoints=settings.worker,
            gateway_id=gateway_id,
            threads=threads,
            metrics=self._metrics,
            on_refused=None if notify.supervisor_fd() is None else self._refuse_model,
            on_loaded=freeze_long_lived_objects,
        )
        siblings = self._siblings = self._find_siblings(directory)
        worker_reports = CollectorRegistry()
        worker_reports.register(WorkerCollector(registry.snapshots))
        services = Services(
            models=registry,
            generator=self._generator(registry, gateway_id),
            key_ring=key_ring,
            salts=Salts(secret, shared=settings.shared_prefix_cache),
            grammars=self._grammars,
            drain=self._drain,
            metrics=self._metrics,
            exposition=partial(render_metrics, self._counted, worker_reports, siblings),
            gateway_index=settings.gateway_index,
            responses=ResponseStore(max_bytes=settings.response_store_size, time_to_live=settings.response_store_ttl),
            streams=StreamStore(max_bytes=settings.stream_buffer_size, grace=settings.stream_grace),
            max_body_size=settings.max_body_size,
            body_timeout=settings.body_timeout,
            keepalive_interval=settings.keepalive_interval,
            relay=siblings,
        )
        app = build_app(services, check_host=key_ring.empty and loopback, cors_origins=settings.cors_origin)

        async def connections(_app: web.Application) -> AsyncIterator[None]:
            await registry.start()
            yield
            await registry.close()
            threads.close()

        app.cleanup_ctx.append(connections)
        if siblings is not None:
            app.cleanup_ctx.append(partial(siblings.listening, FOLLOW_UPS))
        app.cleanup_ctx.append(self._housekeeping)
        return app

    def _generator(self, registry: Registry, gateway_id: str) -> Generator:
        settings = self._settings
        admission = Admission(
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            clock=time.monotonic,
        )
        return Generator(
            registry,
            admission,
            Router(),
            gateway_id=gateway_id,
            request_timeout=settings.request_timeout,
            write_timeout=settings.write_timeout,
            metrics=self._metrics,
        )

    def _find_siblings(self, directory: Path) -> Siblings | None:
        """Return the connection to the other gateway processes, if there are any."""
        index, num_processes = self._settings.gateway_index, self._settings.gateway_processes
        if num_processes == 1:
            return None
        if index >= num_processes:
            raise ConfigurationError(
                f"--gateway-index is {index}; it must be below --gateway-processes, which is {num_processes}"
            )
        return Siblings(directory, index, num_processes, partial(generate_latest, self._counted))

    async def _wait_for_worker(self) -> None:
        """Wait until this process has a worker, or until no other gateway process accepts connections."""
        if self._siblings is None or self._registry is None:
            return
        while not (self._stop.is_set() or self._registry.ready()[0]) and await self._siblings.others_accept():
            notify.ready("waiting_for_a_worker")
            await asyncio.sleep(SCAN_INTERVAL)
        self._siblings.serve()

    async def _listen(self, runner: HttpRunner) -> None:
        host, port = self._settings.host, self._settings.port
        shared = self._settings.gateway_processes > 1
        if shared and port == 0:
            raise ConfigurationError(
                "--port 0 cannot be combined with --gateway-processes, because each process would get another port; "
                "choose a port"
            )
        try:
            await web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_port=shared or None).start()
        except socket.gaierror as error:
            raise ConfigurationError(f"--host {host}: {error.strerror}") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(f"port {port} on {host} is in use; choose another with --port") from None
            raise ConfigurationError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from None

    def _watch_for_shutdown(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

        def supervisor_gone() -> None:
            loop.call_soon_threadsafe(self._stop.set)

        notify.watch_supervisor(supervisor_gone)

    def _on_signal(self) -> None:
        """Begin the drain at the first signal and end it at the second."""
        if self._stop.is_set():
            self._drain.hurry()
        self._stop.set()

    async def _wind_down(self) -> None:
        self._drain.begin()
        timeout = self._settings.drain_timeout
        log.info("draining", in_flight=self._drain.num_in_flight, seconds=timeout)
        notify.stopping("draining")
        notify.extend_timeout(timeout + _STOP_MARGIN, "draining")
        finished = await self._drain.wait(timeout)
        log.info("drained", all_finished=finished)

    async def _housekeeping(self, _app: web.Application) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._measure_lag()), asyncio.create_task(_feed_watchdog())]
        tasks += [asyncio.create_task(_trim_memory()), asyncio.create_task(self._grammars.start())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._grammars.close()

    async def _measure_lag(self) -> None:
        while True:
            due = time.monotonic() + _LAG_INTERVAL
            await asyncio.sleep(_LAG_INTERVAL)
            self._metrics.event_loop_lag.set(max(0.0, time.monotonic() - due))
            self._metrics.log_lines_dropped.set(self._log_writer.dropped)


async def _trim_memory() -> None:
    while True:
        await asyncio.sleep(_TRIM_INTERVAL)
        await asyncio.to_thread(trim_malloc)


async def _feed_watchdog() -> None:
    """Notify systemd's watchdog from the event loop, so that a blocked loop is detected."""
    interval = notify.watchdog_interval()
    while interval is not None:
        notify.watchdog()
        await asyncio.sleep(interval)


def _max_connections() -> int:
    """Return the number of connections that the limit on file descriptors allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft - _OWN_DESCRIPTORS)


def _url(runner: HttpRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def freeze_long_lived_objects() -> None:
    """Exclude all current objects from garbage collection until the next call.

    Modules, and the vocabulary and templates of a model, are hundreds of thousands of objects. Visiting them blocked
    the event loop for 0.1 s each time a long conversation had created some ten thousand other objects.
    """
    gc.unfreeze()  # a model that was removed may have left cycles
    gc.collect()
    gc.freeze()


def trim_malloc() -> None:
    """Return free memory of malloc to the operating system. Call it in a thread.

    It takes 0.1 ms per megabyte that is returned, during which allocations in the same arena wait. Each thread has an
    arena of glibc's malloc, which keeps up to 40 MB that a large prompt used. Fewer arenas, or returning memory at
    once, made requests slower.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
