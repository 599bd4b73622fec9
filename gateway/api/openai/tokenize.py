"""Routes that show how text is tokenized: vLLM's /tokenize and /detokenize, and the render routes.

The render routes return the prompts of a chat or completion request without running it.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.api.common.chat_prompt import chat_prompt, check_counted_ids, check_counted_size, max_counted_tokens
from gateway.api.common.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
    invalid,
    parse_fields,
)
from gateway.api.common.logprobs import token_string
from gateway.api.common.prepare import find_model, prepare_chat
from gateway.api.common.prepared import PreparedRequest
from gateway.api.common.prompts import check_token_ids
from gateway.api.common.tools import tool_request
from gateway.api.openai.completions import prepare_completion
from gateway.cluster.registry import ModelEntry
from gateway.http.body import read_json
from gateway.http.errors import json_response
from shared.errors import ContextLengthError, InvalidRequestError

_WITH_PROMPT = ("model", "prompt", "messages", "add_special_tokens", "return_token_strs")
"""Fields of /tokenize that do not require `messages`."""


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a `prompt`, or of `messages` rendered by the chat template."""
    fields = parse_fields(await read_json(request), TokenizeFields)
    entry = find_model(request, fields.model)
    check_counted_size([fields.prompt, fields.messages, fields.tools, fields.documents], entry)
    ids = await _encode(fields, entry)
    check_counted_ids(ids, "prompt" if fields.messages is None else "messages", entry)
    strings = await asyncio.to_thread(_token_strings, ids, entry) if fields.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": entry.facts.max_model_len, "tokens": ids, "token_strs": strings}
    )


def _token_strings(ids: list[int], entry: ModelEntry) -> list[str]:
    return [token_string(entry.pipeline.token_bytes(token_id)) for token_id in ids]


async def _encode(fields: TokenizeFields, entry: ModelEntry) -> list[int]:
    if fields.prompt is not None:
        if fields.messages is not None:
            raise InvalidRequestError("prompt and messages cannot be combined. Send one of them.", param="messages")
        for name in fields.__struct_fields__:
            if name not in _WITH_PROMPT and getattr(fields, name) is not None:
                raise invalid(name, "requires messages.")
        special = fields.add_special_tokens is not False
        return await entry.pipeline.encode(fields.prompt, special, max_tokens=max_counted_tokens(entry))
    if fields.messages is None:
        raise InvalidRequestError("Send prompt or messages.", param="prompt")
    if fields.add_special_tokens:
        raise invalid("add_special_tokens", "must not be true for messages: the chat template adds the special tokens.")
    tools = tool_request(fields.tools, None, None)
    return (await chat_prompt(fields, fields.messages, tools, entry, max_counted_tokens(entry))).ids


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of token ids, with special tokens."""
    fields = parse_fields(await read_json(request), DetokenizeFields)
    entry = find_model(request, fields.model)
    limit = entry.facts.max_model_len
    if len(fields.tokens) > limit:
        message = f"tokens has {len(fields.tokens)} ids; the model's maximum context length is {limit} tokens."
        raise ContextLengthError(message, param="tokens")
    check_token_ids(fields.tokens, entry.facts, "tokens")
    return json_response({"prompt": await asyncio.to_thread(entry.pipeline.decode, fields.tokens, False)})


async def render_chat(request: web.Request) -> web.StreamResponse:
    """Return the prompt of a chat request."""
    fields = parse_fields(await read_json(request), ChatFields)
    return await _rendered(await prepare_chat(request, fields, "chatcmpl-"))


async def render_completion(request: web.Request) -> web.StreamResponse:
    """Return the prompts of a completion request."""
    fields = parse_fields(await read_json(request), CompletionFields)
    return await _rendered(await prepare_completion(request, fields))


async def _rendered(prepared: PreparedRequest) -> web.StreamResponse:
    prompts = [
        {
            "index": index,
            "prompt": await asyncio.to_thread(prepared.entry.pipeline.decode, prompt.token_ids, False),
            "token_ids": prompt.token_ids,
            "max_tokens": prompt.max_tokens,
        }
        for index, prompt in enumerate(prepared.prompts)
    ]
    return json_response({"object": "rendered_prompts", "model": prepared.envelope.model, "prompts": prompts})
