"""The input of /v1/responses: what it continues and refers to, and the prompt that all of it makes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from gateway.api.common.counting import count_chat
from gateway.api.common.fields import ChatFields
from gateway.api.common.prepared_chat import PreparedChat, SizedChat, size_chat, with_grammar
from gateway.api.common.submission import find_model
from gateway.api.responses.fields import InputFields, chat_fields, renamed
from gateway.api.responses.items import REFERENCE, Conversation, input_items
from gateway.api.responses.tools import with_strict, without_strict
from gateway.http.app_keys import GATEWAY_INDEX, IDENTITY, RESPONSES
from gateway.relay import RELAY
from gateway.stores.ids import shown_id
from gateway.stores.items import count_stored, find_items, load_items
from gateway.text.offload import aside, count_objects
from shared.errors import ContextLengthError, InvalidRequestError, NotFoundError, PeltonError

Items = Sequence[Mapping[str, Any]]


async def items_of(request: web.Request, value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of `input`, references resolved, wherever the items are kept.

    Raises InvalidRequestError, also for an item that is referred to twice, and NotFoundError for a reference to what
    this key has not stored.
    """
    num_objects = count_objects(value) if isinstance(value, list) else 1
    items = await aside(num_objects, partial(input_items, value, request.app[GATEWAY_INDEX]))
    wanted = {item["id"] for item in items if item["type"] == REFERENCE}
    if not wanted:
        return items
    found = await _stored_items(request, wanted)
    for index, item in enumerate(items):
        if item["type"] == REFERENCE:
            place = f"input[{index}].id"
            if item["id"] not in wanted:
                message = f"{place} names an item that was referred to before."
                raise InvalidRequestError(message, param=place, code="duplicate_item")
            if item["id"] not in found:
                message = f"There is no stored item with the id {shown_id(item['id'])}, which {place} names."
                raise NotFoundError(message, param=place, code="item_not_found")
            wanted.discard(item["id"])
            items[index] = found[item["id"]]
    return items


async def _stored_items(request: web.Request, wanted: Iterable[str]) -> dict[str, dict[str, Any]]:
    owner, relay = request[IDENTITY].key_hash, request.app[RELAY]
    found = await find_items(request.app[RESPONSES], wanted, owner)
    elsewhere: dict[int, list[str]] = defaultdict(list)
    for identifier in wanted:
        holder = None if relay is None else relay.holder(identifier)
        if identifier not in found and holder is not None:
            elsewhere[holder].append(identifier)
    if relay is not None:
        for holder, identifiers in elsewhere.items():
            found |= await relay.items(holder, identifiers, owner)
    return found


async def history_of(request: web.Request, previous: str | None) -> tuple[bytes, ...]:
    """What a response begins with that continues another, wherever that is kept.

    Raises InvalidRequestError for one that is not kept, as OpenAI does: clients know by it to send the conversation.
    """
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
        message = f"There is no response with the id {shown_id(previous)}, which previous_response_id names."
        raise InvalidRequestError(message, param=name, code="previous_response_not_found") from None


async def prepare(
    request: web.Request, fields: InputFields, model: str, history: Sequence[bytes], items: Items
) -> PreparedChat:
    """What is asked of the model. From here on `fields.tools` say of each tool whether it is strict.

    A tool that does not say so itself is held to its schema where that is possible, as OpenAI documents.
    """
    asked = fields.tools or []
    if asked:
        # In a thread: schemas may be large.
        fields.tools = await asyncio.to_thread(with_strict, asked)
    conversation = await _conversation(fields, history, items)
    chat, sized = await _size(request, fields, model, conversation)
    try:
        try:
            return await with_grammar(request, chat, sized)
        except InvalidRequestError:
            relaxed = without_strict(fields.tools or [], asked)
            if relaxed == (fields.tools or []):
                raise
            fields.tools = relaxed
            chat, sized = await _size(request, fields, model, conversation)
            return await with_grammar(request, chat, sized)
    except PeltonError as error:
        raise renamed(error, ()) from None


async def num_tokens(
    request: web.Request, fields: InputFields, model: str, history: Sequence[bytes], items: Items
) -> int:
    """How many tokens the prompt has, also one that is longer than the model's context, so that a client knows how much
    to leave out. With `truncation` auto it has what is left then: no less than the last turn.
    """
    conversation = await _conversation(fields, history, items)
    messages, places = conversation.messages, conversation.places
    starts = conversation.turns() if fields.truncation == "auto" else []
    if starts:
        try:
            _, sized = await _size(request, fields, model, conversation)
        except ContextLengthError:
            messages, places = conversation.since(starts[-1]), []
        else:
            return len(sized.prompt[0])
    try:
        return await count_chat(chat_fields(fields, model, messages), find_model(request, model))
    except PeltonError as error:
        raise renamed(error, places) from None


async def _conversation(fields: InputFields, history: Sequence[bytes], items: Items) -> Conversation:
    def work() -> Conversation:
        made = Conversation(fields.instructions)
        made.add(load_items(history), "previous_response_id")
        made.add(items, "input[]" if isinstance(fields.input, list) else "input")
        return made

    return await aside(count_stored(history) + count_objects(items), work)


async def _size(
    request: web.Request, fields: InputFields, model: str, conversation: Conversation
) -> tuple[ChatFields, SizedChat]:
    """The chat request, and its prompt. With `truncation` auto the oldest turns are left out until it fits."""
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
