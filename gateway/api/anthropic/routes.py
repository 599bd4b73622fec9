"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, over the same path as chat."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from gateway.api.anthropic.blocks import BlockFeed
from gateway.api.anthropic.chat import chat_of_conversation, chat_of_messages
from gateway.api.anthropic.errors import error_bodies
from gateway.api.anthropic.fields import VERSION_HEADER, ConversationFields, MessagesFields, parse_body
from gateway.api.anthropic.shapes import Ending, MessageEvents, whole_message
from gateway.api.common.counting import count_chat
from gateway.api.common.fields import ChatFields
from gateway.api.common.prepared_chat import size_chat, with_grammar
from gateway.api.common.submission import envelope_of, find_model, submit_all
from gateway.api.common.tool_params import ToolChoiceField
from gateway.flow.requests import ModelEntryLike
from gateway.http.body import LARGE, read_json
from gateway.http.errors import json_response
from gateway.http.sse import stream_events

Fields = TypeVar("Fields", bound=ConversationFields)


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, whole or streamed. Where the context has room for less than max_tokens, it ends there;
    with none the prompt is computed, and then in the prefix cache."""
    fields = parse_body(await read_json(request), MessagesFields, request.headers.getall(VERSION_HEADER, []))
    chat = await _chat(request, chat_of_messages, fields, find_model(request, fields.model))
    sized = await size_chat(request, chat)
    ids, room = sized.prompt
    common = sized.common
    if fields.max_tokens == 0:
        common = dataclasses.replace(common, wanted_tokens=0)
    sized = dataclasses.replace(sized, common=common, prompt=(ids, min(room, fields.max_tokens)))
    prepared = await with_grammar(request, chat, sized)
    common, entry, prompt = prepared.common, prepared.entry, prepared.prompt
    envelope = envelope_of(request, "msg_", common, entry)
    named_tool = isinstance(chat.tool_choice, ToolChoiceField)
    feed = BlockFeed(shows_thinking=fields.thinking is None or fields.thinking.display != "omitted")
    ending = Ending(beyond_context=room < fields.max_tokens, named_tool=named_tool)
    async with await submit_all(request, envelope, common, entry, [prompt]) as events:
        if fields.stream:
            encoder = MessageEvents(envelope, events.tally, ending, feed, error_bodies(request))
            return await stream_events(request, events, encoder, keep_alive=encoder.keep_alive)
        return json_response(await whole_message(envelope, events, events.tally, ending, feed))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the prompt of a conversation has, also of one that is longer than the model's context."""
    fields = parse_body(await read_json(request), ConversationFields, request.headers.getall(VERSION_HEADER, []))
    entry = find_model(request, fields.model)
    chat = await _chat(request, chat_of_conversation, fields, entry)
    return json_response({"input_tokens": await count_chat(chat, entry)})


async def _chat(
    request: web.Request,
    chat_of: Callable[[Fields, ModelEntryLike], ChatFields],
    fields: Fields,
    entry: ModelEntryLike,
) -> ChatFields:
    """What `chat_of` makes of the fields: it looks at each block and tool, of which there may be tens of thousands."""
    if len(await request.read()) > LARGE:
        return await asyncio.to_thread(chat_of, fields, entry)
    return chat_of(fields, entry)
