"""POST /v1/responses, and the routes that read, cancel and delete stored responses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.common.fan_in import FanIn, open_events
from gateway.api.common.fields import invalid, unsupported
from gateway.api.common.prepare import find_model
from gateway.api.common.resumable import fill, separate, stream_log
from gateway.api.responses.fields import (
    ENCRYPTED_REASONING,
    ItemsQuery,
    RetrieveQuery,
    parse_input_tokens_fields,
    parse_response_fields,
)
from gateway.api.responses.input import history_of, items_of, num_tokens, prepare
from gateway.api.responses.shapes import ResponseEvents, response_head, stored_items, stream_failure
from gateway.http.app_keys import IDENTITY, SERVICES
from gateway.http.body import read_json
from gateway.http.errors import cached_json, json_response
from gateway.http.route import query_of
from gateway.http.sse import stream_events
from gateway.stores.responses import ResponseStore, StoredResponse, count_stored, load_items
from gateway.text.offload import count_objects, run_in_thread_if_large
from shared.errors import InvalidRequestError, NotFoundError


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole, streamed, or in the background."""
    fields = parse_response_fields(await read_json(request))
    if fields.background and not request.app[SERVICES].responses.keeps:
        raise invalid("background", "must be false: this server does not store responses (--response-store-size is 0).")
    items = await items_of(request, fields.input)
    history = await history_of(request, fields.previous_response_id)
    prepared, fields = await prepare(request, fields, history, items)
    envelope, detail = prepared.envelope, prepared.detail
    events = open_events(request, prepared)
    stored = await run_in_thread_if_large(count_objects(items), partial(stored_items, items))
    keeper = _Keeper(
        store=request.app[SERVICES].responses if fields.store is not False else None,
        identifier=envelope.identifier,
        owner=request[IDENTITY].key_hash,
        put_in=(*history, stored),
        item_ids=tuple(item["id"] for item in items),
        background=bool(fields.background),
        is_visible=bool(fields.background or fields.stream),
    )
    encoder = ResponseEvents(
        response_head(fields, envelope.identifier, envelope.created, envelope.tier),
        events.tally,
        None if detail.logprobs is None else detail.names,
        may_call=bool(fields.tools),
        packs_reasoning=fields.includes(ENCRYPTED_REASONING),
        gateway_index=request.app[SERVICES].gateway_index,
        on_change=keeper.keep,
    )
    if fields.background:
        return await _run_in_background(request, envelope.identifier, events, encoder, stream=bool(fields.stream))
    async with events:
        if fields.stream:
            return await _stream(request, events, encoder)
        async for event in events:
            encoder.encode(*event)
        encoder.end()
    return json_response(encoder.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keeper:
    """Writer of one response's states to the store.

    Attributes:
        store: The store; None if the response is not stored.
        identifier: Id of the response.
        owner: Hash of the client's key.
        put_in: See StoredResponse.input.
        item_ids: Ids of the items in the last part of `put_in`.
        background: True if the response runs in the background.
        is_visible: True if the client knows the id while the response runs and may ask for it.
    """

    store: ResponseStore | None
    identifier: str
    owner: bytes
    put_in: tuple[bytes, ...]
    item_ids: tuple[str, ...]
    background: bool
    is_visible: bool

    def keep(self, response: dict[str, Any]) -> None:
        """Store the response, which has changed."""
        done = response["status"] not in ("queued", "in_progress")
        if self.store is None or not (done or self.is_visible):
            return
        # A conversation cannot continue after an incomplete call, because no output can answer it.
        items = [
            item
            for item in response["output"]
            if item["status"] == "completed" or (item["status"] == "incomplete" and item["type"] != "function_call")
        ]
        stored = StoredResponse(
            self.owner,
            cached_json(response),
            self.put_in,
            stored_items(items),
            background=self.background,
            done=done,
            item_ids=(*self.item_ids, *(item["id"] for item in items)),
        )
        self.store.put(self.identifier, stored)


async def _stream(request: web.Request, events: FanIn, encoder: ResponseEvents) -> web.StreamResponse:
    """Stream the events. If the client disconnects, the response is stored as cancelled."""
    try:
        return await stream_events(request, events, encoder)
    finally:
        if encoder.running:
            encoder.cancel()


async def _run_in_background(
    request: web.Request, identifier: str, events: FanIn, encoder: ResponseEvents, *, stream: bool
) -> web.StreamResponse:
    """Run a response independently of its connection; its events are kept until a grace period after its end.

    A response that is not admitted is not stored: rejected requests must not evict the responses of others.
    """
    streams, owner = request.app[SERVICES].streams, request[IDENTITY].key_hash
    queued = dict(encoder.response)
    record = streams.open(identifier, owner)

    async def run() -> None:
        with streams.claim(identifier, record):
            await fill(
                record,
                events,
                encoder,
                request.app[SERVICES].drain,
                lambda _, data: separate(data),
                on_admission=encoder.queue,
                on_cancel=encoder.cancel,
            )

    streams.run(identifier, run())
    await asyncio.sleep(0)  # the task's first step is admission
    if record.error is not None:
        raise record.error
    if stream:
        return await stream_log(request, identifier, record, 0, stream_failure)
    return json_response(queued)


async def get_response(request: web.Request) -> web.StreamResponse:
    """Return a stored response, or with `stream=true` the events of one that runs in the background."""
    identifier, owner = request.match_info["id"], request[IDENTITY].key_hash
    query = query_of(request, RetrieveQuery)
    stored = request.app[SERVICES].responses.get(identifier, owner)
    if query.include_obfuscation:
        raise unsupported("include_obfuscation", "must be false: events are not padded.")
    if not query.stream:
        if query.starting_after is not msgspec.UNSET:
            raise invalid("starting_after", "requires stream to be true.")
        return web.Response(body=stored.body, content_type="application/json")
    try:
        record = request.app[SERVICES].streams.find(identifier, owner)
    except NotFoundError:
        message = "The events of this response are not stored: it was not created with background = true, or has ended."
        raise InvalidRequestError(message, param="stream") from None
    seen = 0 if query.starting_after is msgspec.UNSET else query.starting_after + 1
    if seen > record.last:
        raise invalid("starting_after", f"must be the number of an event of this response, at most {record.last - 1}.")
    return await stream_log(request, identifier, record, seen, stream_failure)


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Delete a response, and cancel it if it still runs in the background."""
    identifier = request.match_info["id"]
    request.app[SERVICES].responses.delete(identifier, request[IDENTITY].key_hash)
    await request.app[SERVICES].streams.retire(identifier)
    return json_response({"id": identifier, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """Cancel a response that runs in the background; a response that has ended does not change."""
    identifier, owner = request.match_info["id"], request[IDENTITY].key_hash
    stored = request.app[SERVICES].responses.get(identifier, owner)
    if not stored.background:
        raise InvalidRequestError(
            "Only a response that was created with background = true can be cancelled.", param="id"
        )
    if not stored.done:
        await request.app[SERVICES].streams.stop(identifier)
        stored = request.app[SERVICES].responses.get(identifier, owner)
    return web.Response(body=stored.body, content_type="application/json")


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """Return a page of the input items of a response, including those of the responses before it."""
    query = query_of(request, ItemsQuery)
    stored = request.app[SERVICES].responses.get(request.match_info["id"], request[IDENTITY].key_hash)
    items = await run_in_thread_if_large(count_stored(stored.input), partial(load_items, stored.input))
    if query.order == "desc":
        items.reverse()
    if query.after is not msgspec.UNSET:
        found = [index for index, item in enumerate(items) if item["id"] == query.after]
        if not found:
            raise invalid("after", "must be the id of an item of this response.")
        items = items[found[0] + 1 :]
    page = items[: query.limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > query.limit})


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a response's prompt, which may be longer than the model's context."""
    fields = parse_input_tokens_fields(await read_json(request))
    items = await items_of(request, fields.input)
    history = await history_of(request, fields.previous_response_id)
    model = fields.model or find_model(request, None).name
    count = await num_tokens(request, fields, model, history, items)
    return json_response({"object": "response.input_tokens", "input_tokens": count})
