"""Communication with the other gateway processes on the same port.

Besides the shared port, every process listens on a socket in the runtime directory, which only processes of the same
user can reach. There it answers requests for its metrics and its state, and requests of clients for stored objects,
which name the process that holds them in their id. The process that accepted the connection has authenticated the
client and passes the identity in headers.

GET /metrics shows the metrics of all gateway processes, and those of each worker once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from gateway.http.app_keys import IDENTITY, SERVICES
from gateway.http.auth import Identity, Scope
from gateway.http.body import check_no_fields
from gateway.http.errors import error_response, json_response
from gateway.http.route import Handler, Route
from gateway.stores.ids import gateway_of, shown_id
from gateway.stores.responses import find_items
from shared.errors import ConfigurationError, InvalidRequestError, NotFoundError, PeltonError, UnavailableError
from shared.log import get_logger

_PROBE_SECONDS = 1.0
"""Seconds in which a process must accept a connection, and report its state or its metrics."""
_WAITING, _SERVING = b"waiting", b"serving"
_ANSWER_SECONDS = 5.0
"""Seconds without data after which a request for a stored object fails."""
_NO_ANSWER = "The gateway process that holds this object does not answer. Try again later."
_OWNER = "x-pelton-owner"
_SCOPE = "x-pelton-scope"
_REQUEST_HEADERS = ("Last-Event-ID",)
_RESPONSE_HEADERS = ("Content-Type", "Cache-Control", "X-Accel-Buffering", "Retry-After", "retry-after-ms")

log = get_logger("gateway.siblings")


def peer_socket(directory: Path, index: int) -> Path:
    """Return the path of the socket of gateway `index`."""
    return directory / f"gateway-{index}.sock"


class Siblings:
    """The other gateway processes: client of their sockets, and server on the socket of this process.

    Args:
        directory: Runtime directory with the sockets; see peer_socket.
        index: Index of this process.
        num_processes: Number of gateway processes.
        counted: Function that returns the metrics of this process in Prometheus' text format.
        patience: Seconds without data after which a sibling is considered hung; streams may be silent for longer.
    """

    def __init__(
        self,
        directory: Path,
        index: int,
        num_processes: int,
        counted: Callable[[], bytes] = bytes,
        *,
        patience: float = _ANSWER_SECONDS,
    ) -> None:
        self._directory = directory
        self._index = index
        self._others = [other for other in range(num_processes) if other != index]
        self._counted = counted
        self._patience = patience
        self._state = _WAITING

    async def listening(self, routes: Iterable[Route], public: web.Application) -> AsyncIterator[None]:
        """Listen until the application is cleaned up; for its cleanup_ctx.

        Args:
            routes: Routes that are answered for siblings.
            public: The application that answers clients.

        Raises:
            ConfigurationError: A gateway with this index is already running.
        """
        app = sibling_app(routes, public)
        app.router.add_get("/metrics", self._answer_metrics)
        app.router.add_get("/state", self._answer_state)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await runner.setup()
        path = peer_socket(self._directory, self._index)
        if await _answers(path):
            raise ConfigurationError(
                f"a gateway with --gateway-index {self._index} is already running in {self._directory}; "
                "give each gateway an index of its own"
            )
        path.unlink(missing_ok=True)
        await web.UnixSite(runner, path).start()
        yield
        await runner.cleanup()

    async def _answer_metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._counted())

    async def _answer_state(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._state)

    def serve(self) -> None:
        """Record that this process accepts connections."""
        self._state = _SERVING

    async def metrics(self) -> dict[int, bytes]:
        """Return the metrics, by index, of this gateway and of each other one that answers within a second."""
        answers = await self._ask_others("GET", "/metrics", within=_PROBE_SECONDS)
        return {self._index: self._counted()} | {
            index: answer[1] for index, answer in answers.items() if answer is not None and answer[0] == 200
        }

    async def others_accept(self) -> bool:
        """Return True if another process accepts connections or has a lower index and will do so.

        A process without a worker must not accept its share of connections while other processes have one.
        """
        # This runs several times a second, perhaps before the other processes do, so failures are not logged.
        answers = await self._ask_others("GET", "/state", within=_PROBE_SECONDS, quiet=True)
        return any(
            answer is not None and (answer[1] == _SERVING or index < self._index) for index, answer in answers.items()
        )

    def holder(self, identifier: str) -> int | None:
        """Return the index of the other process that an id names; None if it names this process or none."""
        index = gateway_of(identifier)
        return index if index in self._others else None

    async def pass_on(self, request: web.Request, holder: int) -> web.StreamResponse:
        """Forward a request to a process and its response to the client, as it arrives."""
        headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
        headers |= _identity_headers(request)
        # A stream may be silent for a long time.
        streams = "stream" in request.query or request.path.startswith("/v1/streams/")
        patience, path = None if streams else self._patience, request.rel_url.raw_path_qs
        async with self._request(holder, request.method, path, patience=patience, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status)
            for name in _RESPONSE_HEADERS:
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            await response.prepare(request)
            try:
                async for data in answer.content.iter_any():
                    await response.write(data)
            except aiohttp.ClientError:
                # A regular end would look like a complete response.
                raise ConnectionError("the other gateway process closed the connection") from None
            await response.write_eof()
            return response

    async def ask_all(self, request: web.Request) -> bool:
        """Return True if another process finds the object that a request names.

        Raises:
            UnavailableError: A process that may have it does not answer.
        """
        headers = _identity_headers(request)
        answers = await self._ask_others(
            request.method, request.rel_url.raw_path, within=self._patience, headers=headers
        )
        if any(answer is not None and answer[0] == 200 for answer in answers.values()):
            return True
        if None in answers.values():
            raise UnavailableError("A gateway process that may hold this object does not answer. Try again later.")
        return False

    async def conversation(self, holder: int, identifier: str, owner: bytes) -> tuple[bytes, ...]:
        """Return the conversation that a stored response continues; see app_keys.SiblingStores."""
        path, headers = f"/conversation/{identifier}", {_OWNER: owner.hex()}
        async with self._request(holder, "GET", path, patience=self._patience, headers=headers) as answer:
            if answer.status == 400:
                raise InvalidRequestError(
                    "previous_response_id names a response that has not ended yet; wait for its end.",
                    param="previous_response_id",
                )
            if answer.status != 200:
                raise NotFoundError(f"There is no response with the id {shown_id(identifier)}.")
            return (await _read_body(answer),)

    async def items(self, holder: int, identifiers: Sequence[str], owner: bytes) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids; see app_keys.SiblingStores."""
        body, headers = orjson.dumps(identifiers), {_OWNER: owner.hex()}
        async with self._request(
            holder, "POST", "/items", patience=self._patience, headers=headers, data=body
        ) as answer:
            if answer.status != 200:
                raise UnavailableError(_NO_ANSWER)
            found: dict[str, dict[str, Any]] = orjson.loads(await _read_body(answer))
            return found

    async def _ask_others(
        self, method: str, path: str, *, within: float, **options: Any
    ) -> dict[int, tuple[int, bytes] | None]:
        """Return the status and the body of each sibling's response by index; None if it does not answer in time."""

        async def ask(index: int) -> tuple[int, bytes] | None:
            try:
                async with (
                    asyncio.timeout(within),
                    self._request(index, method, path, patience=None, **options) as answer,
                ):
                    return answer.status, await _read_body(answer)
            except (TimeoutError, UnavailableError):
                return None

        return dict(zip(self._others, await asyncio.gather(*map(ask, self._others))))

    @asynccontextmanager
    async def _request(
        self, index: int, method: str, path: str, *, patience: float | None, quiet: bool = False, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to a sibling.

        Args:
            index: Index of the sibling.
            method: HTTP method.
            path: Path and query.
            patience: Seconds without data after which reading fails; None for no limit.
            quiet: Log nothing if the sibling does not answer.
            options: Further arguments of aiohttp's request.

        Raises:
            UnavailableError: The sibling does not answer in time. A process may hang.
        """
        connector = aiohttp.UnixConnector(str(peer_socket(self._directory, index)))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PROBE_SECONDS, sock_read=patience)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                answer = await session.request(method, f"http://peer{path}", allow_redirects=False, **options)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not quiet:
                    log.warning("gateway_does_not_answer", gateway=index, error=type(error).__name__)
                raise UnavailableError(_NO_ANSWER) from None
            async with answer:
                yield answer


def _identity_headers(request: web.Request) -> dict[str, str]:
    """Return the headers that tell a sibling for whom it answers a request."""
    identity = request[IDENTITY]
    return {_OWNER: identity.key_hash.hex(), _SCOPE: identity.scope.value}


async def _answers(path: Path) -> bool:
    """Return True if a process listens; a socket file may be left over from a process that died."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_unix_connection(path)
    except OSError:  # also a timeout
        return False
    writer.close()
    return True


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raise UnavailableError if it is cut off because its process died or hangs."""
    try:
        return await answer.read()
    except aiohttp.ClientError:
        raise UnavailableError(_NO_ANSWER) from None


def relayed(handler: Handler) -> Handler:
    """Wrap the handler of a public route whose `id` may name another process.

    Bodies of POST requests are refused, not forwarded.
    """

    @functools.wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            await check_no_fields(request)
        relay = request.app[SERVICES].relay
        holder = None if relay is None else relay.holder(request.match_info["id"])
        if not isinstance(relay, Siblings) or holder is None:
            return await handler(request)
        return await relay.pass_on(request, holder)

    return answer


def sibling_app(routes: Iterable[Route], public: web.Application) -> web.Application:
    """Return the application that answers siblings, over the stores of the public application."""
    # The sibling has already limited the size of the client's body.
    app = web.Application(middlewares=[_from_sibling], client_max_size=0)
    app[SERVICES] = dataclasses.replace(public[SERVICES], relay=None)
    app.router.add_get("/conversation/{id}", _answer_conversation)
    app.router.add_post("/items", _answer_items)
    for route in routes:
        for method in route.methods:
            app.router.add_route(method, route.path, route.handler)
    return app


@web.middleware
async def _from_sibling(request: web.Request, handler: Handler) -> web.StreamResponse:
    if _OWNER not in request.headers:
        return await handler(request)
    scope = Scope(request.headers.get(_SCOPE, Scope.INFERENCE))
    request[IDENTITY] = Identity("", scope, bytes.fromhex(request.headers[_OWNER]))
    try:
        return await handler(request)
    except PeltonError as error:
        return error_response(error)


async def _answer_conversation(request: web.Request) -> web.StreamResponse:
    conversation = request.app[SERVICES].responses.continued(request.match_info["id"], request[IDENTITY].key_hash)
    # Concatenate the JSON arrays without parsing them: they may be long.
    items = b",".join(part[1:-1] for part in conversation if part != b"[]")
    return web.Response(body=b"[%b]" % items, content_type="application/json")


async def _answer_items(request: web.Request) -> web.StreamResponse:
    wanted = orjson.loads(await request.read())
    return json_response(await find_items(request.app[SERVICES].responses, wanted, request[IDENTITY].key_hash))


async def render_metrics(
    counted: CollectorRegistry, workers: CollectorRegistry, siblings: Siblings | None = None
) -> bytes:
    """Return metrics in Prometheus' text format.

    Args:
        counted: Metrics of this process.
        workers: Metrics that the workers report.
        siblings: The other gateway processes; None if there is only one.
    """
    text = generate_latest(counted) if siblings is None else labelled(await siblings.metrics())
    return text + generate_latest(workers)


class _Labelled:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def labelled(texts: Mapping[int, bytes]) -> bytes:
    """Merge the metrics of several processes, with the index of the process in the label `gateway`.

    Text that cannot be parsed is omitted.

    The samples are not summed: when a process dies, its counts disappear, and Prometheus would take the falling sum
    for a counter that was reset and count the remaining value again.
    """
    families: dict[str, Metric] = {}
    for index, text in sorted(texts.items()):
        try:
            parsed = list(text_string_to_metric_families(text.decode()))
        except ValueError as error:
            log.warning("gateway_metrics_unreadable", gateway=index, error=type(error).__name__)
            continue
        for family in parsed:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "gateway": str(index)}, sample.value)
    return generate_latest(_Labelled(families.values()))
