"""GET / and /page/{file}: the page for chat and status, as files without a build step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from aiohttp import web

from shared.errors import NotFoundError

_FOLDER = Path(__file__).parents[2] / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Nothing but the page's own files and the gateway's own API, and nobody may put it into a frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    # An answer's links are the model's words: not even their hosts' names are looked up before a click.
    "X-DNS-Prefetch-Control": "off",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def page(request: web.Request) -> web.StreamResponse:
    """The page for chat and status."""
    return _answer("index.html")


async def page_file(request: web.Request) -> web.StreamResponse:
    """A file of the page."""
    return _answer(request.match_info["file"])


def _answer(name: str) -> web.Response:
    body = _files().get(name)
    if body is None:
        raise NotFoundError("The page has no such file.")
    kind = _TYPES[Path(name).suffix]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)


@lru_cache(1)
def _files() -> Mapping[str, bytes]:
    """All there are: a name from outside never becomes a path."""
    return MappingProxyType({path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES})
