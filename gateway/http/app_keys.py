"""Typed keys of the objects that an application and a request carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from gateway.cluster.registry import Registry
from gateway.flow.requests import AdmittingGeneratorLike
from gateway.flow.salt import Salts
from gateway.http.auth import Identity, KeyRing
from gateway.http.drain import Drain
from gateway.stores.responses import ResponseStore
from gateway.stores.streams import StreamStore
from gateway.text.grammars.checker import GrammarChecker
from shared.log import get_logger
from shared.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request; see GatewaySettings for their meaning and units."""

    max_body_size: int
    body_timeout: float
    keepalive_interval: float


class MetricsSource(Protocol):
    """Renderer of /metrics (gateway.siblings.Exposition)."""

    async def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        ...


class SiblingStores(Protocol):
    """Stores of the other gateway processes (gateway.siblings.Relay)."""

    def holder(self, identifier: str) -> int | None:
        """Return the index of the other process that an id names; None if it names this process or none."""
        ...

    async def ask_all(self, request: web.Request) -> bool:
        """Return True if another process finds the object that a request names.

        Raises:
            UnavailableError: A process that may have it does not answer.
        """
        ...

    async def conversation(self, holder: int, identifier: str, owner: bytes) -> tuple[bytes, ...]:
        """Return the conversation that a stored response continues.

        Raises:
            NotFoundError: The process has no such response.
            InvalidRequestError: The response has not ended.
            UnavailableError: The process does not answer.
        """
        ...

    async def items(self, holder: int, identifiers: Sequence[str], owner: bytes) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, by id, without those that do not exist.

        Raises:
            UnavailableError: The process does not answer.
        """
        ...


LIMITS = web.AppKey("LIMITS", Limits)
MODELS = web.AppKey[Registry]("MODELS")
GENERATOR = web.AppKey[AdmittingGeneratorLike]("GENERATOR")
KEY_RING = web.AppKey("KEY_RING", KeyRing)
SALTS = web.AppKey("SALTS", Salts)
GRAMMARS = web.AppKey("GRAMMARS", GrammarChecker)
GATEWAY_INDEX = web.AppKey("GATEWAY_INDEX", int)
DRAIN = web.AppKey("DRAIN", Drain)
EXPOSITION = web.AppKey[MetricsSource]("EXPOSITION")
RELAY = web.AppKey[SiblingStores | None]("RELAY")
METRICS = web.AppKey("METRICS", GatewayMetrics)
RESPONSES = web.AppKey("RESPONSES", ResponseStore)
STREAMS = web.AppKey("STREAMS", StreamStore)

REQUEST_ID = web.RequestKey("REQUEST_ID", str)
STARTED = web.RequestKey("STARTED", float)
IDENTITY = web.RequestKey("IDENTITY", Identity)
QUERY = web.RequestKey[Any]("QUERY")
"""Parsed query parameters; see gateway.http.route."""

log = get_logger("gateway.http")
