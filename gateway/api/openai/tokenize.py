"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.api.common.chat_prompt import PromptFields, chat_prompt
from gateway.api.common.counting import check_count, check_size, most_tokens
from gateway.api.common.fields import DetokenizeFields, TokenizeFields, parse_fields
from gateway.api.common.logprobs import token_string
from gateway.api.common.prompts import check_token_ids
from gateway.api.common.submission import find_model
from gateway.api.common.tool_params import tool_request
from gateway.flow.requests import ModelEntryLike
from gateway.http.body import read_json
from gateway.http.errors import json_response
from shared.errors import ContextLengthError, InvalidRequestError

_WITH_MESSAGES = (
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "tools",
)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Token ids of a `prompt`, or of `messages` as the chat template renders them."""
    fields = parse_fields(await read_json(request), TokenizeFields)
    entry = find_model(request, fields.model)
    check_size([fields.prompt, fields.messages, fields.tools, fields.documents], entry)
    ids = await _encode(fields, entry)
    check_count(ids, "prompt" if fields.messages is None else "messages", entry)
    token_strings = None
    if fields.return_token_strs:
        token_strings = await asyncio.to_thread(_token_strings, ids, entry)
    return json_response(
        {"count": len(ids), "max_model_len": entry.facts.max_model_len, "tokens": ids, "token_strs": token_strings}
    )


def _token_strings(ids: list[int], entry: ModelEntryLike) -> list[str]:
    return [token_string(entry.pipeline.token_bytes(token_id)) for token_id in ids]


async def _encode(fields: TokenizeFields, entry: ModelEntryLike) -> list[int]:
    if fields.prompt is not None:
        if fields.messages is not None:
            raise InvalidRequestError("Send either prompt or messages, not both.", param="messages")
        for name in _WITH_MESSAGES:
            if getattr(fields, name) is not None:
                raise InvalidRequestError(f"{name} goes with messages.", param=name)
        special = fields.add_special_tokens is not False
        return await entry.pipeline.encode(fields.prompt, special, max_tokens=most_tokens(entry))
    if fields.messages is None:
        raise InvalidRequestError("Send prompt or messages.", param="prompt")
    if fields.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens goes with prompt; a chat template adds its own.", param="add_special_tokens"
        )
    prompt_fields = PromptFields(
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        documents=fields.documents,
    )
    tools = tool_request(fields.tools, None, None)
    prompt = await chat_prompt(fields.messages, tools, prompt_fields, entry, max_tokens=most_tokens(entry))
    return prompt.ids


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Text of token ids, special tokens included."""
    fields = parse_fields(await read_json(request), DetokenizeFields)
    entry = find_model(request, fields.model)
    if len(fields.tokens) > entry.facts.max_model_len:
        raise ContextLengthError(
            f"tokens has {len(fields.tokens)} ids; the model's maximum context length is "
            f"{entry.facts.max_model_len} tokens.",
            param="tokens",
        )
    check_token_ids(fields.tokens, entry.facts, "tokens")
    return json_response({"prompt": await asyncio.to_thread(entry.pipeline.decode, fields.tokens, False)})
