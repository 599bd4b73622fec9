"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from gateway.api.common.fields import ChatFields, parse_fields
from gateway.api.common.prepared_chat import prepare_chat
from gateway.api.common.resumable import stream
from gateway.api.common.submission import detail_of, envelope_of, submit_all
from gateway.api.openai.chat_shapes import ChatChunks, whole_chat_response
from gateway.http.body import read_json
from gateway.http.errors import json_response


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, whole or streamed. max_tokens defaults to what is left of the context."""
    fields = parse_fields(await read_json(request), ChatFields)
    prepared = await prepare_chat(request, fields)
    common, entry, prompt = prepared.common, prepared.entry, prepared.prompt
    envelope, detail = envelope_of(request, "chatcmpl-", common, entry), detail_of(common, entry, [prompt])
    submitted = await submit_all(request, envelope, common, entry, [prompt])
    tally, show_reasoning = submitted.tally, fields.include_reasoning is not False
    if fields.stream:
        chunks = ChatChunks(
            envelope,
            tally,
            detail,
            include_usage=common.include_usage,
            continuous_usage=common.continuous_usage,
            show_reasoning=show_reasoning,
        )
        return await stream(request, envelope.identifier, submitted, chunks, resumable=common.resumable)
    async with submitted as events:
        return json_response(
            await whole_chat_response(envelope, common.n, events, tally, detail, show_reasoning=show_reasoning)
        )
