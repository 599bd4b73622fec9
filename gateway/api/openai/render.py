"""POST /v1/chat/completions/render and /v1/completions/render: what would be asked of the model, without asking it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.api.common.fields import ChatFields, CompletionFields, parse_fields
from gateway.api.common.generation_params import Common
from gateway.api.common.prepared_chat import prepare_chat
from gateway.api.common.submission import SizedPrompt, generation_requests
from gateway.api.openai.completions import prepare_completion
from gateway.flow.requests import ModelEntryLike
from gateway.http.body import read_json
from gateway.http.errors import json_response


async def render_chat(request: web.Request) -> web.StreamResponse:
    """The prompt of a conversation, made and checked as chat makes and checks it."""
    prepared = await prepare_chat(request, parse_fields(await read_json(request), ChatFields))
    return await _rendered(prepared.common, prepared.entry, [prepared.prompt])


async def render_completion(request: web.Request) -> web.StreamResponse:
    """The prompts of a completions request, likewise."""
    prepared = await prepare_completion(request, parse_fields(await read_json(request), CompletionFields))
    return await _rendered(prepared.common, prepared.entry, prepared.prompts)


async def _rendered(common: Common, entry: ModelEntryLike, prompts: Sequence[SizedPrompt]) -> web.StreamResponse:
    await generation_requests("render", common, entry, prompts)
    rendered = [
        {
            "index": index,
            "prompt": await asyncio.to_thread(entry.pipeline.decode, ids, False),
            "token_ids": ids,
            "max_tokens": max_tokens,
        }
        for index, (ids, max_tokens) in enumerate(prompts)
    ]
    return json_response({"object": "rendered_prompts", "model": common.fields.model, "prompts": rendered})
