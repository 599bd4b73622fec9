"""Another gateway process that hangs or dies while it is queried for stored objects: 503 in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gateway.siblings import Siblings, peer_socket
from tests.fakes.http_gateway import Gateway, run_gateway

NUMBER = "01" + "0" * 30
FROZEN = b""
CUT_OFF = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n[{"id":'
CONTINUED = {"model": "fake", "input": "hi", "previous_response_id": f"resp_{NUMBER}"}
REFERRED = {"model": "fake", "input": [{"type": "item_reference", "id": f"msg_{NUMBER}"}]}


@contextlib.asynccontextmanager
async def beside(directory: Path, answer: bytes) -> AsyncIterator[Gateway]:
    """Run a gateway whose sibling sends `answer` and closes; with an empty answer it hangs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if not answer:
            await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(serve, peer_socket(directory, 1))
    async with server, run_gateway(relay=Siblings(directory, 0, 2, patience=0.1)) as gateway:
        yield gateway


@pytest.mark.parametrize("answer", [FROZEN, CUT_OFF], ids=["frozen", "cut off"])
@pytest.mark.parametrize("body", [CONTINUED, REFERRED], ids=["continued", "referred"])
async def test_objects_of_a_silent_sibling_are_unavailable(tmp_path, body, answer):
    async with beside(tmp_path, answer) as gateway, asyncio.timeout(40):
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            status, refusal, headers = await gateway.post(path, body)
            assert (status, refusal["error"]["code"]) == (503, "service_unavailable")
            assert headers["Retry-After"]


async def test_requests_relayed_to_a_silent_sibling_end(tmp_path):
    path = f"/v1/responses/resp_{NUMBER}"
    async with beside(tmp_path, FROZEN) as gateway, asyncio.timeout(40):
        assert (await gateway.get(path))[0] == 503
        assert (await gateway.get(path + "/input_items"))[0] == 503
        assert (await gateway.post(path + "/cancel", {}))[0] == 503
        # The request is validated before it is relayed.
        assert (await gateway.post(path + "/cancel", {"a": 1}))[1]["error"]["param"] == "a"
    with contextlib.suppress(FileNotFoundError):  # removed in Python 3.13
        os.unlink(peer_socket(tmp_path, 1))
    async with beside(tmp_path, CUT_OFF) as gateway:
        with pytest.raises(aiohttp.ClientError):
            await gateway.get(path)


async def test_a_stream_may_be_silent_for_longer(tmp_path):
    async with beside(tmp_path, FROZEN) as gateway:
        for path in (f"/v1/streams/cmpl-{NUMBER}", f"/v1/responses/resp_{NUMBER}?stream=true"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await gateway.get(path)
