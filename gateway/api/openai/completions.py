"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from gateway.api.common.fan_in import FanIn
from gateway.api.common.fields import CompletionFields, parse_fields
from gateway.api.common.generation_params import Common, common_of_completion
from gateway.api.common.prompts import MAX_CHOICES_IN_ALL, Prompt, check_token_ids, longest_text, split_prompts
from gateway.api.common.request_grammar import request_grammar
from gateway.api.common.resumable import stream
from gateway.api.common.submission import (
    DEFAULT_MAX_TOKENS,
    SizedPrompt,
    detail_of,
    encode_prompt,
    envelope_of,
    find_model,
    fit_prompt,
    submit_all,
)
from gateway.api.openai.best_of import best_choices
from gateway.api.openai.completion_shapes import Choices, CompletionChunks, whole_completion_response
from gateway.api.openai.fill_in_middle import can_fill_in_middle, fill_in_middle
from gateway.flow.events import TextDelta
from gateway.flow.requests import ModelEntryLike
from gateway.http.app_keys import IDENTITY, SALTS
from gateway.http.body import read_json
from gateway.http.errors import json_response
from shared.errors import InvalidRequestError


async def completions(request: web.Request) -> web.StreamResponse:
    """Continues one or several prompts, whole or streamed; choice index = prompt index * n + choice."""
    fields = parse_fields(await read_json(request), CompletionFields)
    prepared = await prepare_completion(request, fields)
    common, entry, texts, prompts = prepared.common, prepared.entry, prepared.texts, prepared.prompts
    envelope, detail = envelope_of(request, "cmpl-", common, entry), detail_of(common, entry, prompts)
    choices = Choices(await _echoes(texts, prompts, fields, entry), detail)
    submitted = await submit_all(request, envelope, common, entry, prompts)
    tally = submitted.tally
    if fields.stream:
        chunks = CompletionChunks(
            envelope,
            tally,
            choices,
            include_usage=common.include_usage,
            continuous_usage=common.continuous_usage,
        )
        return await stream(request, envelope.identifier, submitted, chunks, resumable=common.resumable)
    async with submitted as events:
        num_choices = len(prompts) * common.n
        return json_response(
            await whole_completion_response(envelope, num_choices, _best(events, common), tally, choices)
        )


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """What gateway.api.common.submission.submit_all takes, and the prompts as the client sent them."""

    common: Common
    entry: ModelEntryLike
    texts: Sequence[Prompt]
    prompts: Sequence[SizedPrompt]


async def prepare_completion(request: web.Request, fields: CompletionFields) -> PreparedCompletion:
    """Checks the fields and makes the prompts. Raises InvalidRequestError, ContextLengthError, ModelNotFoundError."""
    entry = find_model(request, fields.model)
    if fields.suffix == "" and not can_fill_in_middle(entry.pipeline):
        fields.suffix = None  # nothing stands behind: that is how this model continues every prompt
    common = common_of_completion(fields, request[IDENTITY], request.app[SALTS])
    texts = split_prompts(fields.prompt)
    _check_number(len(texts), common)
    common = dataclasses.replace(common, grammar=await request_grammar(request, common, entry))
    prompts: list[SizedPrompt] = []
    for index, text in enumerate(texts):
        param = f"prompt[{index}]" if len(texts) > 1 else "prompt"
        ids, common = await _encode(text, fields, common, entry, param)
        if not ids:
            raise InvalidRequestError(f"{param} has no tokens.", param=param)
        prompts.append(fit_prompt(ids, common, DEFAULT_MAX_TOKENS, entry, param))
    return PreparedCompletion(common, entry, texts, prompts)


def _check_number(num_prompts: int, common: Common) -> None:
    if num_prompts * common.best_of > MAX_CHOICES_IN_ALL:
        param = "n" if common.best_of == common.n else "best_of"
        raise InvalidRequestError(
            f"{num_prompts} prompts with {param} = {common.best_of} are {num_prompts * common.best_of} choices; "
            f"at most {MAX_CHOICES_IN_ALL} are allowed.",
            param=param,
        )


async def _encode(
    text: Prompt, fields: CompletionFields, common: Common, entry: ModelEntryLike, param: str
) -> tuple[list[int], Common]:
    """Ids of a prompt, and the request with what ends the completion of such a prompt."""
    special = fields.add_special_tokens is not False
    most = longest_text(fields, entry.facts)
    if fields.suffix is None:
        return await encode_prompt(text, entry, param, add_special_tokens=special, max_tokens=most), common
    if not isinstance(text, str):
        check_token_ids(text, entry.facts, param)
    filled = await fill_in_middle(
        text, fields.suffix, entry.pipeline, add_special_tokens=special, max_tokens=most, param=param
    )
    stops = {"stop_token_ids": tuple(dict.fromkeys((*(fields.stop_token_ids or ()), *filled.end_ids)))}
    return filled.token_ids, dataclasses.replace(common, sampling={**common.sampling, **stops})


def _best(events: FanIn, common: Common) -> AsyncIterator[tuple[int, int, TextDelta]]:
    if common.best_of == common.n or common.beams is not None:
        return events
    return best_choices(events, common.best_of, common.n)


async def _echoes(
    texts: Sequence[Prompt], prompts: Sequence[SizedPrompt], fields: CompletionFields, entry: ModelEntryLike
) -> list[str] | None:
    """The text of each prompt as the model has it, or None without echo."""
    if not fields.echo:
        return None
    return [
        text
        if isinstance(text, str) and fields.truncate_prompt_tokens is None
        else await asyncio.to_thread(entry.pipeline.decode, ids, False)
        for text, (ids, _) in zip(texts, prompts, strict=True)
    ]
