"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.api.body import read_json
from gateway.api.completion_shapes import Choices, CompletionChunks, whole_completion_response
from gateway.api.generation_params import common_of_completion
from gateway.api.params import CompletionFields, parse_fields
from gateway.api.prompts import MAX_CHOICES_IN_ALL, Prompt, completion_budget, split_prompts
from gateway.api.sse import stream_events
from gateway.flow.requests import ModelEntryLike
from gateway.keys import IDENTITY, SALTS
from gateway.responses import json_response
from gateway.routes.common import encode_prompt, find_model, now, response_id, submit_all
from shared.errors import InvalidRequestError

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Continues one or several prompts, whole or streamed; choice index = prompt index * n + choice."""
    fields = parse_fields(await read_json(request), CompletionFields)
    common = common_of_completion(fields, request[IDENTITY], request.app[SALTS])
    prompts = split_prompts(fields.prompt)
    num_choices = len(prompts) * common.n
    if num_choices > MAX_CHOICES_IN_ALL:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {common.n} are {num_choices} choices; "
            f"at most {MAX_CHOICES_IN_ALL} are allowed.",
            param="n",
        )
    entry = find_model(request, fields.model)
    several = len(prompts) > 1
    budgets: list[tuple[list[int], int]] = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if several else "prompt"
        ids = await encode_prompt(prompt, entry, param)
        if not ids:
            raise InvalidRequestError(f"{param} has no tokens.", param=param)
        budgets.append((ids, completion_budget(len(ids), common.wanted_tokens, DEFAULT_MAX_TOKENS, entry.facts, param)))
    echoes = await _echoes(prompts, entry) if fields.echo else None

    identifier, created = response_id("cmpl"), now()
    choices = Choices(echoes, entry.pipeline.token_bytes if common.logprobs is not None else None)
    async with submit_all(request, identifier, common, entry, budgets) as events:
        tally = events.tally
        if fields.stream:
            chunks = CompletionChunks(
                identifier, created, fields.model, tally, choices, include_usage=common.include_usage
            )
            return await stream_events(request, events, chunks)
        return json_response(
            await whole_completion_response(identifier, created, fields.model, num_choices, events, tally, choices)
        )


async def _echoes(prompts: Sequence[Prompt], entry: ModelEntryLike) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else await asyncio.to_thread(entry.pipeline.decode, prompt, False)
        for prompt in prompts
    ]
