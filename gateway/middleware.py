"""Middleware of every request: request id, authentication, error responses, common headers."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
import uuid
from collections.abc import Mapping, Sequence

from aiohttp import web

from gateway.api.anthropic.errors import asks_anthropic, error_shape
from gateway.http.app_keys import IDENTITY, REQUEST_ID, SERVICES, STARTED, log
from gateway.http.auth import Scope
from gateway.http.errors import RATE_LIMIT_HEADERS, error_response, http_exception_response, rate_limit_headers
from gateway.http.route import Handler, Route, query_of
from gateway.http.sse import unexpected_error
from shared.errors import InvalidRequestError, NotFoundError, PeltonError, PermissionDeniedError
from shared.log import bind_request_id

OPENAI_VERSION = "2020-10-01"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_SHOWN_PATH = 200
_PROBES = ("/health", "/ready", "/metrics")
_EXPOSED_HEADERS = ", ".join(
    ("x-request-id", "request-id", "openai-processing-ms", "retry-after", "retry-after-ms", *RATE_LIMIT_HEADERS)
)


class Middleware:
    """Wrapper of every handler, including those of unknown routes.

    Args:
        routes: Requirements of each registered route; others are denied.
        check_host: Refuse Host headers that do not name the loopback interface (DNS rebinding).
        cors_origins: Origins that browsers may call from; "*" allows any.
    """

    def __init__(
        self, routes: Mapping[web.AbstractRoute, Route], *, check_host: bool, cors_origins: Sequence[str]
    ) -> None:
        self._routes = routes
        self._check_host = check_host
        self._cors_origins = frozenset(cors_origins)

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request. Only cancellation and a disconnected client leave by an exception."""
        _begin(request)
        # The context is not restored: aiohttp gives each request a task of its own.
        bind_request_id(request[REQUEST_ID])
        metrics = request.app[SERVICES].metrics
        metrics.http_requests_in_flight.inc()
        try:
            response = await self._answer(request, handler)
        except (asyncio.CancelledError, ConnectionError):
            # The response, if there was one, may not have arrived.
            _write_line("connection_lost", request)
            raise
        finally:
            metrics.http_requests_in_flight.dec()
        # Routes are our own patterns and there are few statuses, so the labels are bounded.
        metrics.http_requests.labels(_route_name(request), str(response.status)).inc()
        _write_line("request", request, status=response.status)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        drain = request.app[SERVICES].drain
        try:
            self._check_headers(request)
            if (preflight := self._preflight(request)) is not None:
                return preflight
            if (unmatched := request.match_info.http_exception) is not None:
                if unmatched.status == 404:
                    # The message repeats the path, because a wrong base URL of a client is a frequent cause.
                    raise NotFoundError(f"There is no route {request.method} {request.path[:_MAX_SHOWN_PATH]}.")
                raise unmatched
            route = self._authorize(request)
            if route.query is not None:
                query_of(request, route.query)
            if route.scope is Scope.PUBLIC:
                return await handler(request)
            with drain.admit():
                try:
                    return await handler(request)
                except asyncio.CancelledError:
                    if (shutdown := drain.take_over_cancellation()) is None:
                        raise
                    return error_response(shutdown, error_shape(request))
        except PeltonError as error:
            return error_response(error, error_shape(request))
        except web.HTTPException as error:
            return http_exception_response(error, error_shape(request))
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - the last line: whatever it is, the client gets an error object
            log.exception("request failed", route=_route_name(request))
            return error_response(unexpected_error(), error_shape(request))

    def _check_headers(self, request: web.Request) -> None:
        hosts = request.headers.getall("Host", [])
        if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
            raise InvalidRequestError("A request must have exactly one Host header.", code="bad_host")
        if self._check_host and hosts and not is_loopback_host(hosts[0]):
            raise PermissionDeniedError(
                "A server without API keys accepts only Host headers that name this machine. Use 127.0.0.1, or "
                "configure a key.",
                code="host_not_allowed",
            )

    def _authorize(self, request: web.Request) -> Route:
        # The matched route decides, never the text of the URL or of the Host header.
        route = self._routes.get(request.match_info.route)
        if route is None:
            raise PermissionDeniedError("This route is not available.")
        request[IDENTITY] = request.app[SERVICES].key_ring.authorize(route.scope, request.headers)
        return route

    def _preflight(self, request: web.Request) -> web.Response | None:
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if self._allowed_origin(request) is None:
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            # Allow every requested header: OpenAI's SDK sends a dozen of its own, and none of them grants a page more
            # than its key does.
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)

    def _allowed_origin(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None or not self._cors_origins:
            return None
        if "*" in self._cors_origins:
            return "*"
        return origin if origin in self._cors_origins else None

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Set the headers of every response; signal handler for on_response_prepare."""
        if REQUEST_ID not in request:
            # aiohttp refused the request before the middleware ran (an unknown Expect).
            _begin(request)
        headers = response.headers
        headers["x-request-id"] = request[REQUEST_ID]
        if asks_anthropic(request):
            headers["request-id"] = request[REQUEST_ID]
        headers["openai-version"] = OPENAI_VERSION
        headers["Server"] = "pelton"
        headers["openai-processing-ms"] = str(round((time.perf_counter() - request[STARTED]) * 1000))
        headers["X-Content-Type-Options"] = "nosniff"
        # Clients without a key must not learn how busy the server is.
        if IDENTITY in request and self._routes[request.match_info.route].admitted:
            headers.update(rate_limit_headers(*request.app[SERVICES].generator.room()))
        if (origin := self._allowed_origin(request)) is not None:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS
        if self._cors_origins:
            headers["Vary"] = "Origin"
        if request.app[SERVICES].drain.draining:
            # aiohttp has already written its Connection header, so force_close alone would not inform the client.
            response.force_close()
            headers["Connection"] = "close"


def _begin(request: web.Request) -> None:
    request[STARTED] = time.perf_counter()
    request[REQUEST_ID] = request_id_of(request)


def _write_line(event: str, request: web.Request, **fields: int) -> None:
    route = _route_name(request)
    # Probes arrive every few seconds; their log lines would hide the others.
    write = log.debug if route in _PROBES else log.info
    seconds = round(time.perf_counter() - request[STARTED], 4)
    write(event, method=request.method, route=route, **fields, seconds=seconds)


def request_id_of(request: web.BaseRequest) -> str:
    """Return the client's request id if it is safe to repeat in headers and logs, else a new one."""
    for name in ("X-Client-Request-Id", "X-Request-Id"):
        value = request.headers.get(name, "")
        if _REQUEST_ID.fullmatch(value):
            return value
    return new_request_id()


def new_request_id() -> str:
    """Return an id for a request without one."""
    return f"req_{uuid.uuid4().hex}"


def is_loopback_host(host: str) -> bool:
    """Return True if a Host header names the loopback interface, with or without a port."""
    name = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?", host)
    if name is None:
        return False
    bare = name[1].strip("[]").lower()
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare in ("localhost", "localhost.localdomain") or bare.endswith(".localhost")


def _route_name(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
