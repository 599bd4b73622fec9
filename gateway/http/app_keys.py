"""Typed keys for what an application and a request carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.exposition import Exposition
from gateway.flow.requests import AdmittingGeneratorLike, ModelsLike
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


LIMITS = web.AppKey("LIMITS", Limits)
MODELS = web.AppKey[ModelsLike]("MODELS")
GENERATOR = web.AppKey[AdmittingGeneratorLike]("GENERATOR")
KEY_RING = web.AppKey("KEY_RING", KeyRing)
SALTS = web.AppKey("SALTS", Salts)
GRAMMARS = web.AppKey("GRAMMARS", GrammarChecker)
GATEWAY_INDEX = web.AppKey("GATEWAY_INDEX", int)
DRAIN = web.AppKey("DRAIN", Drain)
EXPOSITION = web.AppKey("EXPOSITION", Exposition)
METRICS = web.AppKey("METRICS", GatewayMetrics)
RESPONSES = web.AppKey("RESPONSES", ResponseStore)
STREAMS = web.AppKey("STREAMS", StreamStore)

REQUEST_ID = web.RequestKey("REQUEST_ID", str)
STARTED = web.RequestKey("STARTED", float)
IDENTITY = web.RequestKey("IDENTITY", Identity)
QUERY = web.RequestKey[Any]("QUERY")
"""Its parameters, once they were parsed: see gateway.http.query."""

log = get_logger("gateway.http")
