"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, on top of the pipeline of chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from gateway.api.anthropic.chat import chat_of_conversation, chat_of_messages
from gateway.api.anthropic.errors import error_shape
from gateway.api.anthropic.fields import VERSION_HEADER, ConversationFields, MessagesFields, parse_body
from gateway.api.anthropic.shapes import BlockFeed, Ending, MessageEvents, whole_message
from gateway.api.common.chat_prompt import count_chat
from gateway.api.common.fan_in import open_events
from gateway.api.common.fields import ChatFields, ToolChoiceField
from gateway.api.common.prepare import find_model, finish_chat, render_chat
from gateway.cluster.registry import ModelEntry
from gateway.http.body import LARGE, read_json
from gateway.http.errors import json_response
from gateway.http.sse import stream_events

Fields = TypeVar("Fields", bound=ConversationFields)


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or streamed.

    max_tokens is clamped to what the context has left. max_tokens = 0 computes the prompt, which is cached, and
    generates nothing.
    """
    fields = parse_body(await read_json(request), MessagesFields, request.headers.getall(VERSION_HEADER, []))
    chat = await _chat_fields(request, chat_of_messages, fields, find_model(request, fields.model))
    rendered = await render_chat(request, chat, clamped_max_tokens=fields.max_tokens)
    prepared = await finish_chat(request, chat, rendered, "msg_")
    envelope = prepared.envelope
    feed = BlockFeed(shows_thinking=fields.thinking is None or fields.thinking.display != "omitted")
    ending = Ending(
        beyond_context=rendered.prompt.room < fields.max_tokens,
        named_tool=isinstance(chat.tool_choice, ToolChoiceField),
    )
    async with open_events(request, prepared) as events:
        if fields.stream:
            encoder = MessageEvents(envelope, events.tally, ending, feed, error_shape(request))
            return await stream_events(request, events, encoder, keep_alive=encoder.keep_alive)
        return json_response(await whole_message(envelope, events, events.tally, ending, feed))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a conversation, which may be longer than the model's context."""
    fields = parse_body(await read_json(request), ConversationFields, request.headers.getall(VERSION_HEADER, []))
    entry = find_model(request, fields.model)
    chat = await _chat_fields(request, chat_of_conversation, fields, entry)
    return json_response({"input_tokens": await count_chat(chat, entry)})


async def _chat_fields(
    request: web.Request,
    chat_of: Callable[[Fields, ModelEntry], ChatFields],
    fields: Fields,
    entry: ModelEntry,
) -> ChatFields:
    """Return `chat_of(fields, entry)`, called in a thread if the body is large: it visits every block and tool."""
    if len(await request.read()) > LARGE:
        return await asyncio.to_thread(chat_of, fields, entry)
    return chat_of(fields, entry)
