"""Communication with the other gateway processes on the same port.

Besides the shared port, every gateway listens on a socket in the runtime directory. Only processes of the same user
can reach it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from shared.errors import ConfigurationError
from shared.log import get_logger

_PATIENCE_SECONDS = 1.0
_WAITING, _SERVING = b"waiting", b"serving"

log = get_logger("gateway.siblings")


def peer_socket(directory: Path, index: int) -> Path:
    """Return the path of the socket of gateway `index`."""
    return directory / f"gateway-{index}.sock"


class Peers:
    """Server for the siblings of this process, and client of theirs.

    Args:
        directory: Runtime directory with the sockets.
        index: Index of this process.
        num_processes: Number of gateway processes.
        counted: Function that returns the metrics of this process in Prometheus' text format.
        follow_ups: Function that makes the application for siblings from the application for clients.
    """

    def __init__(
        self,
        directory: Path,
        index: int,
        num_processes: int,
        counted: Callable[[], bytes],
        follow_ups: Callable[[web.Application], web.Application],
    ) -> None:
        self._directory = directory
        self._index = index
        self._num_processes = num_processes
        self._counted = counted
        self._follow_ups = follow_ups
        self._state = _WAITING

    async def listening(self, public: web.Application) -> AsyncIterator[None]:
        """Listen until the application is cleaned up; for its cleanup_ctx.

        Raises:
            ConfigurationError: A gateway with this index is already running.
        """
        app = self._follow_ups(public)
        app.router.add_get("/metrics", self._answer_metrics)
        app.router.add_get("/state", self._answer_state)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await runner.setup()
        path = peer_socket(self._directory, self._index)
        if await asyncio.to_thread(_answers, path):
            raise ConfigurationError(
                f"a gateway with --gateway-index {self._index} is already running in {self._directory}; "
                "give each gateway an index of its own"
            )
        path.unlink(missing_ok=True)
        await web.UnixSite(runner, path).start()
        yield
        await runner.cleanup()

    async def metrics(self) -> dict[int, bytes]:
        """Return the metrics of each gateway that answers within a second, including this one, by index."""
        return {self._index: self._counted(), **await self._ask_all("metrics")}

    async def cover(self) -> bool:
        """Return True if another process accepts connections or has a lower index and will do so.

        A process without a worker must not accept its share of connections while other processes have one.
        """
        states = await self._ask_all("state")
        return any(state == _SERVING or index < self._index for index, state in states.items())

    def serve(self) -> None:
        """Record that this process accepts connections."""
        self._state = _SERVING

    async def _ask_all(self, what: str) -> dict[int, bytes]:
        others = [index for index in range(self._num_processes) if index != self._index]
        answers = await asyncio.gather(*(self._ask(index, what) for index in others))
        return {index: answer for index, answer in zip(others, answers) if answer is not None}

    async def _ask(self, index: int, what: str) -> bytes | None:
        connector = aiohttp.UnixConnector(str(peer_socket(self._directory, index)))
        timeout = aiohttp.ClientTimeout(_PATIENCE_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as session,
                session.get(f"http://peer/{what}") as response,
            ):
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if what == "metrics":
                log.warning("gateway_does_not_answer", gateway=index, error=type(error).__name__)
            return None

    async def _answer_metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._counted())

    async def _answer_state(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._state)


def _answers(path: Path) -> bool:
    """Return True if a process listens; a socket file may be left over from a process that died."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PATIENCE_SECONDS)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
