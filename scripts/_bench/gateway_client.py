"""What a benchmark's client sends to a gateway and takes from it, with as little of its own time as may be."""

from __future__ import annotations

import asyncio
import json

from scripts._bench.gateway_processes import BenchError

_LAST_CHUNK = b"\r\n0\r\n\r\n"


def post(path: str, **fields: object) -> bytes:
    """A request with a JSON body, as it goes over the wire."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def bare(method: str, path: str, **headers: str) -> bytes:
    """A request without a body."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}\r\n".encode()


class Client:
    """Sends one request after the other, on a connection that it keeps until it leaves."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def begin(self, data: bytes, *statuses: int) -> tuple[asyncio.StreamReader, bytes]:
        """The body, to be read, and the head of the answer. Raises BenchError for a status that is none of these."""
        if self._connection is None:
            self._connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._connection
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if int(head[9:12]) not in statuses:
            raise BenchError(f"none of {statuses}: {head[:200]!r}")
        return reader, head

    async def ask(self, data: bytes, status: int = 200) -> bytes:
        """The whole body; of a stream with the frames of its chunks. Raises BenchError for another status."""
        reader, head = await self.begin(data, status)
        if b"Transfer-Encoding: chunked" in head:
            return await reader.readuntil(_LAST_CHUNK)
        length = head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
        return await reader.readexactly(int(length or b"0"))

    def leave(self) -> None:
        """Breaks the connection off, in the middle of an answer too; the next request has another."""
        if self._connection is not None:
            self._connection[1].transport.abort()
            self._connection = None
