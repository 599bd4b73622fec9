"""Parts of aiohttp that gateway.http.aiohttp_internals depends on."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from gateway.http.aiohttp_internals import (
    ConnectionProtocol,
    ProtocolRunner,
    ProtocolServer,
    has_started,
    send_continue,
    write_chunk,
)


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Server(ProtocolServer):
    def __call__(self) -> ConnectionProtocol:
        return ConnectionProtocol(self, **self.protocol_options())


async def test_server_makes_protocols_that_know_the_state_of_their_parser() -> None:
    release = asyncio.Event()

    async def handler(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handler)
    runner = ProtocolRunner(app, Server)
    await runner.setup()
    server = runner.server
    assert isinstance(server, Server) and server.num_connections == 0
    protocol, transport = server(), Transport()
    protocol.connection_made(transport)
    assert server.num_connections == 1
    protocol.data_received(b"GET / HTTP/1.1\r\n")
    assert protocol.num_parsed_requests == 0 and not protocol.has_request
    protocol.data_received(b"Host: a\r\n\r\n")
    assert protocol.num_parsed_requests == 1 and protocol.has_request
    await asyncio.sleep(0.01)
    assert protocol.has_request and not transport.sent
    release.set()
    await asyncio.sleep(0.01)
    assert not protocol.has_request and transport.sent.startswith(b"HTTP/1.1 200")
    await runner.cleanup()


async def test_continue_is_not_counted_as_a_part_of_the_response() -> None:
    transport = Transport()
    server = web.Server(lambda _request: None)  # type: ignore[return-value]
    protocol = server()
    protocol.connection_made(transport)
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    request = make_mocked_request("POST", "/", writer=writer)
    await send_continue(request)
    assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n" and not has_started(request)
    await writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert has_started(request)


async def test_chunk_has_the_framing_of_the_stream_writer() -> None:
    ours, theirs = Transport(), Transport()
    protocol = web.Server(lambda _request: None)()  # type: ignore[return-value]
    protocol.connection_made(theirs)
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    writer.enable_chunking()
    await writer.write(b"data: token\n\n")
    write_chunk(ours, b"data: token\n\n")
    assert ours.sent == theirs.sent
