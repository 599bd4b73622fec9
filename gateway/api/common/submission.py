"""Steps that several routes share."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from aiohttp import web

from gateway.api.common.envelope import Detail, Envelope, fingerprint
from gateway.api.common.fan_in import FanIn
from gateway.api.common.fields import CompletionFields
from gateway.api.common.generation_params import Common
from gateway.api.common.prompts import check_token_ids, completion_budget, truncated
from gateway.api.common.sampling_fields import needs_words, word_ids
from gateway.api.common.speculation import check_speculation, prediction_ids
from gateway.flow.beam_search import BeamSearcher
from gateway.flow.events import GenerationRequest
from gateway.flow.requests import GeneratorLike, ModelEntryLike
from gateway.http.app_keys import DRAIN, GATEWAY_INDEX, GENERATOR, IDENTITY, MODELS, REQUEST_ID, log
from gateway.stores.ids import new_id, shown_id
from shared.errors import InvalidRequestError, ModelNotFoundError

MAX_MODEL_NAME = 256
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for completions."""
MAX_PROMPT_VALUES = 1_048_576
"""Log-probabilities of prompt tokens in a response: 20 alternatives for some 50,000 tokens."""

SizedPrompt = tuple[list[int], int]
"""Ids of a prompt, and how many tokens may be generated."""


def find_model(request: web.Request, name: str | None) -> ModelEntryLike:
    """The named model, or the only one where a route lets the name out. Raises ModelNotFoundError."""
    models = request.app[MODELS]
    if name is None:
        entries = models.models()
        if len(entries) == 1:
            return entries[0]
        raise ModelNotFoundError("The request must name a model.", param="model")
    if not 1 <= len(name) <= MAX_MODEL_NAME or not name.isprintable():
        raise ModelNotFoundError(f"There is no model with the name {shown_id(name)}.", param="model")
    return models.model(name)


async def encode_prompt(
    prompt: str | list[int], entry: ModelEntryLike, param: str, *, add_special_tokens: bool, max_tokens: int
) -> list[int]:
    """Token ids of a plain prompt; ids are checked against the vocabulary."""
    if isinstance(prompt, str):
        return await entry.pipeline.encode(prompt, add_special_tokens, max_tokens=max_tokens, param=param)
    check_token_ids(prompt, entry.facts, param)
    return prompt


def fit_prompt(ids: list[int], common: Common, default: int | None, entry: ModelEntryLike, param: str) -> SizedPrompt:
    """The prompt, truncated where that was asked for, and how many tokens may follow it.

    Args:
        default: how many where the client does not say; None: what is left of the context.
    """
    fields, facts = common.fields, entry.facts
    room_for = common.wanted_tokens or default or DEFAULT_MAX_TOKENS
    ids = truncated(ids, fields.truncate_prompt_tokens, fields.truncation_side, room_for, facts)
    return ids, completion_budget(len(ids), common.wanted_tokens, default, facts, param)


def envelope_of(request: web.Request, prefix: str, common: Common, entry: ModelEntryLike) -> Envelope:
    """What surrounds the choices of a response; its id is new, and the worker's requests are named after it."""
    return Envelope(
        identifier=new_id(prefix, request.app[GATEWAY_INDEX]),
        created=int(time.time()),
        model=common.fields.model,
        fingerprint=fingerprint(entry.facts),
        tier=common.accounting.tier,
        metadata=common.accounting.metadata,
    )


def detail_of(common: Common, entry: ModelEntryLike, prompts: Sequence[SizedPrompt]) -> Detail:
    """What the response tells of its tokens."""
    return Detail(
        token_bytes=entry.pipeline.token_bytes,
        logprobs=common.shown_logprobs,
        prompt_logprobs=common.shown_prompt_logprobs,
        token_ids=bool(common.fields.return_token_ids),
        as_token_ids=bool(common.fields.return_tokens_as_token_ids),
        prompts=[ids for ids, _ in prompts],
    )


def _check_reports(common: Common, prompts: Sequence[SizedPrompt]) -> None:
    """A response repeats what it tells of a prompt for each choice: 128 times a long one would be gigabytes."""
    fields, shown = common.fields, common.shown_prompt_logprobs
    num_repeats = 1
    for_token = 0 if shown is None else shown + 1
    if isinstance(fields, CompletionFields):
        num_repeats = common.n
        if fields.echo and fields.logprobs is not None:
            for_token += fields.logprobs + 1
    num_values = sum(len(ids) for ids, _ in prompts) * for_token * num_repeats
    if num_values > MAX_PROMPT_VALUES:
        raise InvalidRequestError(
            f"The response would have {num_values} log-probabilities of prompt tokens; at most {MAX_PROMPT_VALUES} are "
            "possible. Ask for fewer alternatives, choices or prompts.",
            param="logprobs" if shown is None else "prompt_logprobs",
        )


async def generation_requests(
    identifier: str, common: Common, entry: ModelEntryLike, prompts: Sequence[SizedPrompt]
) -> list[GenerationRequest]:
    """One request for each prompt, checked to the last field. Raises InvalidRequestError naming the one at fault."""
    facts = entry.facts
    _check_reports(common, prompts)
    check_speculation(common.fields, facts)
    if needs_words(common.fields):
        common = dataclasses.replace(common, words=await word_ids(common.fields, entry.pipeline))
    common = dataclasses.replace(common, prediction=await prediction_ids(common.fields, entry))
    requests = []
    for index, (ids, max_tokens) in enumerate(prompts):
        if index:
            await asyncio.sleep(0)  # hundreds of prompts with long lists of ids take a while: others have their turn
        requests.append(common.generation_request(f"{identifier}-{index}", ids, max_tokens, facts.vocab_size))
    return requests


async def submit_all(
    request: web.Request, envelope: Envelope, common: Common, entry: ModelEntryLike, prompts: Sequence[SizedPrompt]
) -> FanIn:
    """One generation for each prompt, submitted when the result is entered; leaving that cancels what is left.

    Until then the request can be aborted by the response's id and by its own.
    """
    facts = entry.facts
    requests = await generation_requests(envelope.identifier, common, entry, prompts)
    generator: GeneratorLike = request.app[GENERATOR]
    if common.beams is not None:
        generator = BeamSearcher(generator, common.beams, entry.pipeline, facts)
    log.debug("submit", response_id=envelope.identifier, prompts=len(requests), n=common.n)
    place = request.app[DRAIN].named((envelope.identifier, request[REQUEST_ID]), request[IDENTITY].key_hash)
    return FanIn(generator, requests, facts.eos_token_ids, scores_only=common.scores_only, place=place)
