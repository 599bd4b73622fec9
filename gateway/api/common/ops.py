"""Operational routes: health, readiness, version, metrics, the web page, and aborting a request."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from aiohttp import web

from gateway.http.app_keys import IDENTITY, SERVICES
from gateway.http.auth import Scope
from gateway.http.errors import json_response
from gateway.stores.ids import shown_id
from shared.errors import NotFoundError, UnavailableError

_VERSION = importlib.metadata.version("pelton")
_FOLDER = Path(__file__).parents[2] / "page"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE_HEADERS = {
    # Only the page's own files and the gateway's own API; no other site may frame the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    # The model writes the links of an answer: do not resolve their host names before a click.
    "X-DNS-Prefetch-Control": "off",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def health(request: web.Request) -> web.StreamResponse:
    """Report that the process is alive, with or without workers, so that a supervisor does not restart it for them."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.StreamResponse:
    """Report whether a request sent now would be served."""
    if request.app[SERVICES].drain.draining:
        raise UnavailableError("The server is shutting down.", retry_after=1.0, code="not_ready")
    is_ready, reason = request.app[SERVICES].models.ready()
    if not is_ready:
        raise UnavailableError(reason, retry_after=1.0, code="not_ready")
    return json_response({"status": "ready"})


async def version(request: web.Request) -> web.StreamResponse:
    """Return Pelton's version, but not those of its dependencies, which would help an attacker."""
    return json_response({"version": _VERSION})


async def metrics(request: web.Request) -> web.StreamResponse:
    """Return all metrics in Prometheus' text format."""
    body = await request.app[SERVICES].exposition()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def abort_request(request: web.Request) -> web.StreamResponse:
    """Abort a running request by the id of its response or of its HTTP request.

    The aborted request ends with an error that says so. Admin keys may abort every request, other keys only their own.
    The id of an HTTP request does not tell which gateway process runs it, so all of them are asked.
    """
    identifier, identity = request.match_info["id"], request[IDENTITY]
    owner = None if identity.scope is Scope.ADMIN else identity.key_hash
    found = request.app[SERVICES].drain.abort(identifier, owner) > 0
    if (relay := request.app[SERVICES].relay) is not None:
        found = await relay.ask_all(request) or found
    if not found:
        raise NotFoundError(f"There is no running request with the id {shown_id(identifier)}.")
    return json_response({"id": identifier, "object": "request", "aborted": True})


async def page(request: web.Request) -> web.StreamResponse:
    """Return the web page for chat and status."""
    return _page_response("index.html")


async def page_file(request: web.Request) -> web.StreamResponse:
    """Return a file of the web page."""
    return _page_response(request.match_info["file"])


def _page_response(name: str) -> web.Response:
    body = _page_files().get(name)
    if body is None:
        raise NotFoundError(f"The page has no file {shown_id(name)}.")
    kind = _MEDIA_TYPES[Path(name).suffix]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_PAGE_HEADERS)


@lru_cache(1)
def _page_files() -> Mapping[str, bytes]:
    """Read all files of the page. Names from requests are only looked up here and never become paths."""
    files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}
    return MappingProxyType(files)
