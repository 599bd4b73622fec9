"""POST /v1/responses and what is asked of a response afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from gateway.api.body import read_json
from gateway.api.fan_in import FanIn
from gateway.api.params import ChatFields
from gateway.api.query import parse_query
from gateway.api.response_fields import (
    InputFields,
    ItemsQuery,
    RetrieveQuery,
    chat_fields,
    parse_input_tokens_fields,
    parse_response_fields,
    renamed,
)
from gateway.api.response_items import Conversation, input_items
from gateway.api.response_shapes import ResponseEvents, response_head, stored_items, stream_failure
from gateway.api.sse import stream_events
from gateway.keys import DRAIN, IDENTITY, RESPONSES, STREAMS
from gateway.relay import RELAY
from gateway.responses import dump_json, json_response
from gateway.routes.common import detail_of, envelope_of, find_model, submit_all
from gateway.routes.prepared_chat import PreparedChat, SizedChat, size_chat, with_grammar
from gateway.routes.streams import fill, separate, stream_log
from gateway.stores.responses import ResponseStore, StoredResponse
from shared.errors import ContextLengthError, InvalidRequestError, NotFoundError, PeltonError

_LOAD_IN_THREAD_ABOVE = 262_144


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, whole, streamed, or in the background."""
    fields = parse_response_fields(await read_json(request))
    items = input_items(fields.input)
    history = await _history(request, fields.previous_response_id)
    prepared = await _prepare(request, fields, fields.model, history, items)
    common, entry = prepared.common, prepared.entry
    envelope, detail = envelope_of(request, "resp_", common, entry), detail_of(common, entry, [prepared.prompt])
    events = await submit_all(request, envelope, common, entry, [prepared.prompt])
    identifier = envelope.identifier
    keeper = _Keeper(
        request.app[RESPONSES] if fields.store is not False else None,
        identifier,
        request[IDENTITY].key_hash,
        (*history, stored_items(items)),
        background=bool(fields.background),
    )
    encoder = ResponseEvents(
        response_head(fields, identifier, envelope.created, common.accounting.tier),
        events.tally,
        None if detail.logprobs is None else detail.names,
        may_call=bool(fields.tools),
        on_change=keeper.keep,
    )
    if fields.background:
        return await _run_in_background(request, identifier, events, encoder, keeper, stream=bool(fields.stream))
    async with events:
        if fields.stream:
            return await stream_events(request, events, encoder)
        async for event in events:
            encoder.encode(*event)
        encoder.end()
    return json_response(encoder.response)


class _Keeper:
    """Stores the states of one response.

    Args:
        store: None: it is not to be kept.
        put_in: see StoredResponse.input.
    """

    def __init__(
        self,
        store: ResponseStore | None,
        identifier: str,
        owner: bytes,
        put_in: tuple[bytes, ...],
        *,
        background: bool,
    ) -> None:
        self._store = store
        self._identifier = identifier
        self._owner = owner
        self._put_in = put_in
        self._background = background

    def keep(self, response: dict[str, Any]) -> None:
        """The response has another state. One without a connection can be asked for while it runs."""
        done = response["status"] not in ("queued", "in_progress")
        if self._store is None or not (done or self._background):
            return
        output = stored_items(item for item in response["output"] if item["status"] != "in_progress")
        stored = StoredResponse(
            self._owner, dump_json(response), self._put_in, output, background=self._background, done=done
        )
        self._store.put(self._identifier, stored)


async def _run_in_background(
    request: web.Request, identifier: str, events: FanIn, encoder: ResponseEvents, keeper: _Keeper, *, stream: bool
) -> web.StreamResponse:
    """Runs a response apart from its connection; its events can be read until the grace period after its end."""
    streams, owner = request.app[STREAMS], request[IDENTITY].key_hash
    keeper.keep(encoder.response)
    queued = dict(encoder.response)
    record = streams.open(identifier, owner)

    async def run() -> None:
        with streams.claim(identifier, record):
            try:
                await fill(record, events, encoder, request.app[DRAIN], lambda _, data: separate(data))
            except asyncio.CancelledError:
                # On demand: one that was deleted is not to come back.
                if identifier in request.app[RESPONSES]:
                    encoder.cancel()
                raise
            if record.error is not None:
                encoder.failed(record.error)

    streams.run(identifier, run())
    if stream:
        return await stream_log(request, identifier, record, 0, stream_failure)
    return json_response(queued)


async def get_response(request: web.Request) -> web.StreamResponse:
    """A stored response; with `stream=true` the events of one that was made in the background."""
    identifier, owner = request.match_info["id"], request[IDENTITY].key_hash
    query = parse_query(request.query, RetrieveQuery)
    stored = request.app[RESPONSES].get(identifier, owner)
    if query.include_obfuscation:
        name = "include_obfuscation"
        raise InvalidRequestError(f"{name} must be false.", param=name, code="unsupported_parameter")
    if not query.stream:
        if query.starting_after is not msgspec.UNSET:
            raise InvalidRequestError("starting_after needs stream to be true.", param="starting_after")
        return web.Response(body=stored.body, content_type="application/json")
    try:
        record = request.app[STREAMS].find(identifier, owner)
    except NotFoundError:
        message = "The events of this response are not kept: it was not made in the background, or has ended."
        raise InvalidRequestError(message, param="stream") from None
    seen = 0 if query.starting_after is msgspec.UNSET else query.starting_after + 1
    if seen > record.last:
        name = "starting_after"
        raise InvalidRequestError(f"{name} must be the number of an event of this response.", param=name)
    return await stream_log(request, identifier, record, seen, stream_failure)


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Forgets a response, and ends it if it still runs."""
    identifier = request.match_info["id"]
    request.app[RESPONSES].delete(identifier, request[IDENTITY].key_hash)
    request.app[STREAMS].drop(identifier)
    return json_response({"id": identifier, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """Ends a response that runs in the background; one that has ended stays as it is."""
    identifier, owner = request.match_info["id"], request[IDENTITY].key_hash
    stored = request.app[RESPONSES].get(identifier, owner)
    if not stored.background:
        raise InvalidRequestError("Only a response that was made with background = true can be cancelled.", param="id")
    if not stored.done:
        await request.app[STREAMS].stop(identifier)
        stored = request.app[RESPONSES].get(identifier, owner)
    return web.Response(body=stored.body, content_type="application/json")


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """What was put into a response, with what it continues, a page at a time."""
    query = parse_query(request.query, ItemsQuery)
    stored = request.app[RESPONSES].get(request.match_info["id"], request[IDENTITY].key_hash)
    items = await _loaded(stored.input)
    if query.order == "desc":
        items.reverse()
    if query.after is not msgspec.UNSET:
        found = [index for index, item in enumerate(items) if item["id"] == query.after]
        if not found:
            raise InvalidRequestError("after must be the id of an item of this response.", param="after")
        items = items[found[0] + 1 :]
    page = items[: query.limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > query.limit})


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the prompt of such a response has."""
    fields = parse_input_tokens_fields(await read_json(request))
    items = input_items(fields.input)
    history = await _history(request, fields.previous_response_id)
    model = fields.model or find_model(request, None).name
    _, sized = await _size(request, fields, model, history, items)
    return json_response({"object": "response.input_tokens", "input_tokens": len(sized.prompt[0])})


async def _history(request: web.Request, previous: str | None) -> tuple[bytes, ...]:
    """What a response begins with that continues another, wherever that is kept."""
    if previous is None:
        return ()
    owner, relay = request[IDENTITY].key_hash, request.app[RELAY]
    holder = None if relay is None else relay.holder(previous)
    try:
        if relay is None or holder is None:
            return request.app[RESPONSES].continued(previous, owner)
        return await relay.conversation(holder, previous, owner)
    except NotFoundError:
        name = "previous_response_id"
        message = "There is no response with the id that previous_response_id names."
        raise NotFoundError(message, param=name, code="previous_response_not_found") from None


async def _loaded(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """Stored items; in a thread where they are many."""
    if sum(map(len, parts)) > _LOAD_IN_THREAD_ABOVE:
        return await asyncio.to_thread(_load, parts)
    return _load(parts)


def _load(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for part in parts for item in orjson.loads(part)]


async def _prepare(
    request: web.Request, fields: InputFields, model: str, history: Sequence[bytes], items: Sequence[dict[str, Any]]
) -> PreparedChat:
    chat, sized = await _size(request, fields, model, history, items)
    try:
        return await with_grammar(request, chat, sized)
    except PeltonError as error:
        raise renamed(error, ()) from None


async def _size(
    request: web.Request, fields: InputFields, model: str, history: Sequence[bytes], items: Sequence[dict[str, Any]]
) -> tuple[ChatFields, SizedChat]:
    """The chat request, and its prompt. With `truncation` auto the oldest turns are left out until it fits."""
    conversation = Conversation(fields.instructions)
    conversation.add(await _loaded(history), "previous_response_id")
    conversation.add(items, "input[]" if isinstance(fields.input, list) else "input")
    chat = chat_fields(fields, model, conversation.messages)
    try:
        return chat, await size_chat(request, chat)
    except ContextLengthError as error:
        starts = conversation.turns() if fields.truncation == "auto" else []
        if not starts:
            raise renamed(error, conversation.places) from None
    except PeltonError as error:
        raise renamed(error, conversation.places) from None
    return await _truncated(request, fields, model, conversation, starts)


async def _truncated(
    request: web.Request, fields: InputFields, model: str, conversation: Conversation, starts: Sequence[int]
) -> tuple[ChatFields, SizedChat]:
    """With the first of these beginnings from which on the conversation fits, by bisection."""
    low, high = 0, len(starts) - 1
    found: tuple[ChatFields, SizedChat] | None = None
    while low <= high:
        middle = (low + high) // 2
        chat = chat_fields(fields, model, conversation.since(starts[middle]))
        try:
            found = chat, await size_chat(request, chat)
        except ContextLengthError as error:
            if middle == len(starts) - 1:
                raise renamed(error, ()) from None
            low = middle + 1
        else:
            high = middle - 1
    if found is None:
        raise ContextLengthError("The input does not fit the model's context.", param="input")
    return found
