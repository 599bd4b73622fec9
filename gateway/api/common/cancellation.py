"""DELETE /v1/requests/{id}: ends a running request, by the id of its response or of its HTTP request."""

from __future__ import annotations

from aiohttp import web

from gateway.http.app_keys import DRAIN, IDENTITY
from gateway.http.auth import Scope
from gateway.http.errors import json_response
from gateway.relay import RELAY
from gateway.stores.ids import shown_id
from shared.errors import NotFoundError


async def abort_request(request: web.Request) -> web.StreamResponse:
    """The request ends with an error that says so. Admin keys may abort any, the others their own.

    Which process has an HTTP request its id does not tell: the others are asked too.
    """
    identifier, identity = request.match_info["id"], request[IDENTITY]
    owner = None if identity.scope is Scope.ADMIN else identity.key_hash
    found = request.app[DRAIN].abort(identifier, owner) > 0
    if (relay := request.app.get(RELAY)) is not None:
        found = await relay.ask_all(request) or found
    if not found:
        raise NotFoundError(f"There is no running request with the id {shown_id(identifier)}.")
    return json_response({"id": identifier, "object": "request", "aborted": True})
