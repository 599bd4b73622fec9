"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from gateway.api.body import read_json
from gateway.api.chat_shapes import ChatChunks, whole_chat_response
from gateway.api.generation_params import common_of_chat
from gateway.api.messages import check_messages, check_template_kwargs
from gateway.api.params import ChatFields, parse_fields
from gateway.api.prompts import completion_budget
from gateway.api.sse import stream_events
from gateway.keys import IDENTITY, SALTS
from gateway.responses import json_response
from gateway.routes.common import find_model, now, response_id, submit_all


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, whole or streamed. max_tokens defaults to what is left of the context."""
    fields = parse_fields(await read_json(request), ChatFields)
    common = common_of_chat(fields, request[IDENTITY], request.app[SALTS])
    messages = check_messages(fields.messages)
    entry = find_model(request, fields.model)
    template_kwargs = check_template_kwargs(fields.chat_template_kwargs, entry.pipeline.template_variables)
    ids = await entry.pipeline.encode_chat(
        messages, template_kwargs=template_kwargs, max_tokens=entry.facts.max_model_len
    )
    max_tokens = completion_budget(len(ids), common.wanted_tokens, None, entry.facts, "messages")

    identifier, created = response_id("chatcmpl"), now()
    token_bytes = entry.pipeline.token_bytes if common.logprobs is not None else None
    async with submit_all(request, identifier, common, entry, [(ids, max_tokens)]) as events:
        tally = events.tally
        if fields.stream:
            chunks = ChatChunks(
                identifier, created, fields.model, tally, include_usage=common.include_usage, token_bytes=token_bytes
            )
            return await stream_events(request, events, chunks)
        return json_response(
            await whole_chat_response(identifier, created, fields.model, common.n, events, tally, token_bytes)
        )
