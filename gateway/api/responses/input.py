"""Input of /v1/responses: resolution of references, earlier responses, and the prompt made of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.common.chat_prompt import count_chat
from gateway.api.common.fields import ChatFields, invalid
from gateway.api.common.prepare import RenderedChat, find_model, finish_chat, render_chat
from gateway.api.common.prepared import PreparedRequest
from gateway.api.responses.fields import InputFields, ResponseFields, chat_fields, renamed, with_strict, without_strict
from gateway.api.responses.items import REFERENCE, Conversation, input_items
from gateway.http.app_keys import IDENTITY, SERVICES
from gateway.stores.ids import shown_id
from gateway.stores.responses import count_stored, find_items, load_items
from gateway.text.offload import count_objects, run_in_thread_if_large
from shared.errors import ContextLengthError, InvalidRequestError, NotFoundError, PeltonError

Items = Sequence[Mapping[str, Any]]


async def items_of(request: web.Request, value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of `input`, with references replaced by the items, whichever gateway process stores them.

    Raises:
        InvalidRequestError: An item is invalid or referred to twice.
        NotFoundError: A reference names an item that this key has not stored.
    """
    num_objects = count_objects(value) if isinstance(value, list) else 1
    items = await run_in_thread_if_large(num_objects, partial(input_items, value, request.app[SERVICES].gateway_index))
    wanted = {item["id"] for item in items if item["type"] == REFERENCE}
    if not wanted:
        return items
    found = await _stored_items(request, wanted)
    for index, item in enumerate(items):
        if item["type"] == REFERENCE:
            place = f"input[{index}].id"
            if item["id"] not in wanted:
                problem = "refers to an item that an earlier entry refers to. Refer to each item once."
                raise invalid(place, problem, "duplicate_item")
            if item["id"] not in found:
                message = f"There is no stored item with the id {shown_id(item['id'])}, which {place} refers to."
                raise NotFoundError(message, param=place, code="item_not_found")
            wanted.discard(item["id"])
            items[index] = found[item["id"]]
    return items


async def _stored_items(request: web.Request, wanted: Iterable[str]) -> dict[str, dict[str, Any]]:
    owner, relay = request[IDENTITY].key_hash, request.app[SERVICES].relay
    found = await find_items(request.app[SERVICES].responses, wanted, owner)
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
    """Return the conversation before a response that continues another, whichever gateway process stores that.

    Raises:
        InvalidRequestError: The response is not stored. OpenAI answers the same, and clients then send the whole
            conversation.
    """
    if previous is None:
        return ()
    owner, relay = request[IDENTITY].key_hash, request.app[SERVICES].relay
    holder = None if relay is None else relay.holder(previous)
    try:
        if relay is None or holder is None:
            return request.app[SERVICES].responses.continued(previous, owner)
        return await relay.conversation(holder, previous, owner)
    except NotFoundError:
        name = "previous_response_id"
        message = f"There is no response with the id {shown_id(previous)}, which previous_response_id refers to."
        raise InvalidRequestError(message, param=name, code="previous_response_not_found") from None


async def prepare(
    request: web.Request, fields: ResponseFields, history: Sequence[bytes], items: Items
) -> tuple[PreparedRequest, ResponseFields]:
    """Run the pipeline of chat for a response.

    As OpenAI documents, a tool without `strict` is enforced if its schema allows that. If a grammar of the enforced
    schemas cannot be compiled, the stages run again with only the tools that the client marked as strict.

    Returns:
        The prepared request, and the fields with `strict` set for every tool.
    """
    given = fields.tools or []
    if given:
        # In a thread, because schemas may be large.
        fields = msgspec.structs.replace(fields, tools=await asyncio.to_thread(with_strict, given))
    conversation = await _conversation(fields, history, items)
    chat, rendered = await _render(request, fields, fields.model, conversation)
    try:
        try:
            return await finish_chat(request, chat, rendered, "resp_"), fields
        except InvalidRequestError:
            relaxed = without_strict(fields.tools or [], given)
            if relaxed == (fields.tools or []):
                raise
            fields = msgspec.structs.replace(fields, tools=relaxed)
            chat, rendered = await _render(request, fields, fields.model, conversation)
            return await finish_chat(request, chat, rendered, "resp_"), fields
    except PeltonError as error:
        raise renamed(error, ()) from None


async def num_tokens(
    request: web.Request, fields: InputFields, model: str, history: Sequence[bytes], items: Items
) -> int:
    """Return the number of tokens of the prompt, also if it exceeds the context, so that a client knows the excess.

    With `truncation` auto, the prompt is counted after truncation, but never less than its last turn.
    """
    conversation = await _conversation(fields, history, items)
    messages, places = conversation.messages, conversation.places
    starts = conversation.turns() if fields.truncation == "auto" else []
    if starts:
        try:
            _, rendered = await _render(request, fields, model, conversation)
        except ContextLengthError:
            messages, places = conversation.since(starts[-1]), []
        else:
            return len(rendered.prompt.token_ids)
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

    return await run_in_thread_if_large(count_stored(history) + count_objects(items), work)


async def _render(
    request: web.Request, fields: InputFields, model: str, conversation: Conversation
) -> tuple[ChatFields, RenderedChat]:
    """Return the chat request and its prompt. With `truncation` auto, drop the oldest turns until it fits."""
    chat = chat_fields(fields, model, conversation.messages)
    try:
        return chat, await render_chat(request, chat)
    except ContextLengthError as error:
        starts = conversation.turns() if fields.truncation == "auto" else []
        if not starts:
            raise renamed(error, conversation.places) from None
    except PeltonError as error:
        raise renamed(error, conversation.places) from None
    return await _truncated(request, fields, model, conversation, starts)


async def _truncated(
    request: web.Request, fields: InputFields, model: str, conversation: Conversation, starts: Sequence[int]
) -> tuple[ChatFields, RenderedChat]:
    """Find the first of these starts from which the conversation fits, by bisection."""
    low, high = 0, len(starts) - 1
    fitting: tuple[ChatFields, RenderedChat] | None = None
    while low <= high:
        middle = (low + high) // 2
        chat = chat_fields(fields, model, conversation.since(starts[middle]))
        try:
            fitting = chat, await render_chat(request, chat)
        except ContextLengthError as error:
            if middle == len(starts) - 1:
                raise renamed(error, ()) from None
            low = middle + 1
        else:
            high = middle - 1
    if fitting is None:
        raise ContextLengthError("The input exceeds the model's context, even its last turn alone.", param="input")
    return fitting
