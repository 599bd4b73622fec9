"""Objects that an application and a request carry, under typed keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from gateway.cluster.registry import Registry
from gateway.flow.generation import Generator
from gateway.flow.salt import Salts
from gateway.http.auth import Identity, KeyRing
from gateway.http.drain import Drain
from gateway.stores.responses import ResponseStore
from gateway.stores.streams import StreamStore
from gateway.text.grammars.checker import GrammarChecker
from shared.log import get_logger
from shared.metrics import GatewayMetrics


class SiblingStores(Protocol):
    """Stores of the other gateway processes (gateway.siblings.Siblings)."""

    def holder(self, identifier: str) -> int | None:
        """Return the index of the other process that an id names; None if it names this process or none."""

    async def ask_all(self, request: web.Request) -> bool:
        """Return True if another process finds the object that a request names.

        Raises:
            UnavailableError: A process that may have it does not answer.
        """

    async def conversation(self, holder: int, identifier: str, owner: bytes) -> tuple[bytes, ...]:
        """Return the conversation that a stored response continues.

        Raises:
            NotFoundError: The process has no such response.
            InvalidRequestError: The response has not ended.
            UnavailableError: The process does not answer.
        """

    async def items(self, holder: int, identifiers: Sequence[str], owner: bytes) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, by id, without those that do not exist.

        Raises:
            UnavailableError: The process does not answer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Objects that the routes use, and the limits of a request. The creator starts and closes the objects.

    Attributes:
        models: The served models and their workers.
        generator: Object that admits requests and starts their generations.
        key_ring: The API keys.
        salts: Source of the prefix cache's salts.
        grammars: Checker of the requests' grammars.
        drain: Requests in flight.
        metrics: Metrics of this process.
        exposition: Function that returns the body of /metrics.
        responses: Stored responses.
        streams: Resumable streams.
        max_body_size: Size limit of a request body in bytes.
        body_timeout: Seconds within which a body must arrive.
        keepalive_interval: Seconds of silence after which a stream sends a comment.
        gateway_index: Index of this process among the gateway processes.
        relay: The other gateway processes; None if there are none.
    """

    models: Registry
    generator: Generator
    key_ring: KeyRing
    salts: Salts
    grammars: GrammarChecker
    drain: Drain
    metrics: GatewayMetrics
    exposition: Callable[[], Awaitable[bytes]]
    responses: ResponseStore
    streams: StreamStore
    max_body_size: int
    body_timeout: float
    keepalive_interval: float
    gateway_index: int = 0
    relay: SiblingStores | None = None


SERVICES = web.AppKey("SERVICES", Services)

REQUEST_ID = web.RequestKey("REQUEST_ID", str)
STARTED = web.RequestKey("STARTED", float)
IDENTITY = web.RequestKey("IDENTITY", Identity)
QUERY = web.RequestKey[Any]("QUERY")
"""Parsed query parameters; see gateway.http.route."""

log = get_logger("gateway.http")
