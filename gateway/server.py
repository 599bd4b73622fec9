"""aiohttp's HTTP server with JSON error responses and time limits for clients."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from gateway.http.aiohttp_internals import ConnectionProtocol, ProtocolRunner, ProtocolServer, has_started
from gateway.http.app_keys import log
from gateway.http.errors import HttpError, dump_json, error_object, error_response, http_exception_response
from gateway.middleware import OPENAI_VERSION, new_request_id, request_id_of
from shared.errors import UnavailableError

KEEPALIVE_SECONDS = 75.0
"""Seconds that a connection may stay open without a request, also before its first one."""

_MIN_PROGRESS = 16_384
"""Bytes that a client must read within the write timeout once it has fallen behind."""


class HttpProtocol(ConnectionProtocol):
    """One connection."""

    __slots__ = (
        "_has_received",
        "_header_timeout",
        "_header_timer",
        "_server",
        "_unsent",
        "_write_timeout",
        "_write_timer",
    )

    def __init__(self, manager: HttpServer, *, header_timeout: float, write_timeout: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._server = manager
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timeout = write_timeout
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._has_received = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse surplus connections and start the timer for the first request."""
        super().connection_made(transport)
        if self._server.num_connections > self._server.max_connections:
            error = UnavailableError("The server has too many connections. Try again later.")
            self._answer_and_close("503 Service Unavailable", error_object(error), "Retry-After: 1\r\n")
        else:
            self._header_timer = asyncio.get_running_loop().call_later(KEEPALIVE_SECONDS, self._on_idle)

    def data_received(self, data: bytes) -> None:
        """Start a timer with the first byte of a request, and stop it when its headers are complete."""
        if not self._has_received:
            self._has_received = True
            self._stop_header_timer()
        count = self.num_parsed_requests
        super().data_received(data)
        if self.num_parsed_requests != count:
            self._stop_header_timer()
        elif self._header_timer is None and not self.has_request:
            self._header_timer = asyncio.get_running_loop().call_later(self._header_timeout, self._on_headers_timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timers with the connection."""
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the write timer: the client reads more slowly than data is sent and must make progress from now on."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Stop the write timer: the client has caught up."""
        self._stop_write_timer()
        super().resume_writing()

    def _watch_writing(self) -> None:
        self._unsent = self._num_unsent()
        self._write_timer = asyncio.get_running_loop().call_later(self._write_timeout, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        if self._unsent - self._num_unsent() >= _MIN_PROGRESS:
            self._watch_writing()
        elif isinstance(self.transport, asyncio.WriteTransport):
            log.warning("client_does_not_read")
            self.transport.abort()

    def _num_unsent(self) -> int:
        transport = self.transport
        return transport.get_write_buffer_size() if isinstance(transport, asyncio.WriteTransport) else 0

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_headers_timeout(self) -> None:
        self._header_timer = None
        # A newer request owns the connection. The keep-alive timeout handles the incomplete one after it.
        if self.transport is None or self.has_request:
            return
        self._answer_and_close("408 Request Timeout", error_object(HttpError(408)))

    def _on_idle(self) -> None:
        self._header_timer = None
        self.force_close()

    def _answer_and_close(self, status: str, error: dict[str, Any], headers: str = "") -> None:
        """Answer outside any request and close the connection."""
        body = dump_json(error)
        headers += f"x-request-id: {new_request_id()}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        if self.transport is not None:
            self.transport.write(
                f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}\r\n".encode() + body
            )
        self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer errors of the parser, and exceptions that passed the middleware.

        aiohttp's messages may contain raw input and are not sent.
        """
        if has_started(request):
            raise ConnectionError("the response has already begun")
        request_id = request_id_of(request)
        if status >= 500:
            log.error("request_failed_outside_handler", request_id=request_id, exc_info=exc)
        else:
            log.info("malformed request", request_id=request_id, error=type(exc).__name__)
        response = error_response(HttpError(431 if isinstance(exc, LineTooLong) else status))
        _add_common_headers(response, request_id)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Convert exceptions that aiohttp raises outside the middleware (an unknown Expect) to JSON."""
        if isinstance(resp, web.HTTPException):
            resp = http_exception_response(resp)
            _add_common_headers(resp, request_id_of(request))
        return await super().finish_response(request, resp, start_time)


def _add_common_headers(response: web.Response, request_id: str) -> None:
    response.headers["x-request-id"] = request_id
    response.headers["openai-version"] = OPENAI_VERSION
    response.headers["Server"] = "pelton"


class HttpServer(ProtocolServer):
    """Factory of HttpProtocol objects, one per connection."""

    def __init__(self, server: web.Server, *, max_connections: int, **timeouts: float) -> None:
        super().__init__(server)
        self._timeouts = timeouts
        self.max_connections = max_connections

    def __call__(self) -> HttpProtocol:
        """Return a protocol for a new connection."""
        return HttpProtocol(self, **self._timeouts, **self.protocol_options())


class HttpRunner(ProtocolRunner):
    """Runner of the application on HttpServer.

    Args:
        app: The application.
        max_header_size: Bytes of a header line and of the request line.
        header_timeout: Seconds within which the headers of a request must arrive.
        write_timeout: Seconds within which a client that has fallen behind must read.
        max_connections: Connections above which further ones get status 503, so that file descriptors remain for
            workers and files.
    """

    __slots__ = ()

    def __init__(
        self,
        app: web.Application,
        *,
        max_header_size: int,
        header_timeout: float,
        write_timeout: float,
        max_connections: int,
    ) -> None:
        super().__init__(
            app,
            partial(
                HttpServer, header_timeout=header_timeout, write_timeout=write_timeout, max_connections=max_connections
            ),
            access_log=None,
            handler_cancellation=True,
            # A compressed body is refused by its header. Even an unread body must not be inflated (CVE-2026-54278).
            auto_decompress=False,
            max_line_size=max_header_size,
            max_field_size=max_header_size,
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=5.0,
            shutdown_timeout=2.0,
        )
