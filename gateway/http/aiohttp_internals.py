"""Private or undocumented parts of aiohttp that the gateway depends on.

No other module uses them. aiohttp is pinned to one minor version in pyproject.toml, and
tests/unit/gateway/http/test_aiohttp_internals.py fails if one of these parts changes.

The public API does not offer them: a server with another protocol class, the state of the request parser (for the time
limit on headers), a delayed `100 Continue`, and writing a chunk without the coroutines of `StreamResponse.write`, which
take longer per token than the rest of gateway.http.sse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class ConnectionProtocol(RequestHandler):
    """Protocol of one connection, with the state of its parser."""

    __slots__ = ()

    @property
    def num_parsed_requests(self) -> int:
        """Number of requests whose headers have been parsed."""
        return self._request_count

    @property
    def has_request(self) -> bool:
        """True if a request is being answered or waits for its answer."""
        return self._request_in_progress or bool(self._messages)


class ProtocolServer(web.Server):
    """Factory of the protocols of an application's connections.

    Args:
        server: The server that aiohttp made for the application.
    """

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def protocol_options(self) -> dict[str, Any]:
        """Return the keyword arguments of RequestHandler for a new connection."""
        return {"loop": self._loop, **self._kwargs}


class ProtocolRunner(web.AppRunner):
    """AppRunner that replaces aiohttp's server.

    Args:
        app: The application.
        wrap_server: Function from aiohttp's server to the server that replaces it.
        options: Further arguments of AppRunner.
    """

    __slots__ = ("_wrap_server",)

    def __init__(self, app: web.Application, wrap_server: Callable[[web.Server], web.Server], **options: Any) -> None:
        super().__init__(app, **options)
        self._wrap_server = wrap_server

    async def _make_server(self) -> web.Server:
        return self._wrap_server(await super()._make_server())


async def send_continue(request: web.Request) -> None:
    """Send `100 Continue`, which aiohttp would otherwise send before the middleware runs."""
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the interim response does not belong to the response


def has_started(request: web.BaseRequest) -> bool:
    """Return True if bytes of the response have been written."""
    return request.writer.output_size > 0


def write_chunk(transport: asyncio.WriteTransport, data: bytes) -> None:
    """Write one chunk of a response with `Transfer-Encoding: chunked`, as its StreamWriter would."""
    transport.write(b"%x\r\n%b\r\n" % (len(data), data))
