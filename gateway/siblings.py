"""The other gateway processes on this port: where each answers its siblings, and what it is asked.

Every gateway listens on a socket of the runtime directory besides the port that they share. Only processes of the
same user reach it.
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
    """Where gateway `index` answers."""
    return directory / f"gateway-{index}.sock"


class Peers:
    """This process among its siblings.

    Args:
        counted: gives what the process counts, in Prometheus' text format.
        follow_ups: makes the application that answers siblings, of the one that answers clients.
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
        """For an application's cleanup_ctx. Raises ConfigurationError where a gateway of this index runs already."""
        app = self._follow_ups(public)
        app.router.add_get("/metrics", self._answer_metrics)
        app.router.add_get("/state", self._answer_state)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await runner.setup()
        path = peer_socket(self._directory, self._index)
        if await asyncio.to_thread(_answers, path):
            raise ConfigurationError(
                f"a gateway of --gateway-index {self._index} runs already in {self._directory}; each has its own"
            )
        path.unlink(missing_ok=True)
        await web.UnixSite(runner, path).start()
        yield
        await runner.cleanup()

    async def metrics(self) -> dict[int, bytes]:
        """What each gateway that answers within a second has counted, by index; this one's too."""
        return {self._index: self._counted(), **await self._ask_all("metrics")}

    async def cover(self) -> bool:
        """Whether another process takes the connections: one serves, or one of a lower index is to.

        A process that no worker has joined must not take its share of them while the others have one.
        """
        states = await self._ask_all("state")
        return any(state == _SERVING or index < self._index for index, state in states.items())

    def serve(self) -> None:
        """From here on this process takes connections."""
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
                log.warning("a gateway does not answer", gateway=index, error=type(error).__name__)
            return None

    async def _answer_metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._counted())

    async def _answer_state(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._state)


def _answers(path: Path) -> bool:
    """Whether somebody listens; a socket file alone may be left from a process that died."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PATIENCE_SECONDS)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
