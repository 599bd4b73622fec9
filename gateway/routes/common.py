"""Steps that several routes share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from aiohttp import web

from gateway.api.fan_in import FanIn
from gateway.api.generation_params import Common
from gateway.api.prompts import check_token_ids
from gateway.flow.events import GenerationRequest
from gateway.flow.requests import ModelEntryLike
from gateway.keys import GENERATOR, MODELS, log
from shared.errors import ModelNotFoundError

MAX_MODEL_NAME = 256


def find_model(request: web.Request, name: str | None) -> ModelEntryLike:
    """The named model, or the only one where a route lets the name out. Raises ModelNotFoundError."""
    models = request.app[MODELS]
    if name is None:
        entries = models.models()
        if len(entries) == 1:
            return entries[0]
        raise ModelNotFoundError("The request must name a model.", param="model")
    if not 1 <= len(name) <= MAX_MODEL_NAME or not name.isprintable():
        raise ModelNotFoundError("There is no model with that name.", param="model")
    return models.model(name)


async def encode_prompt(prompt: str | list[int], entry: ModelEntryLike, param: str) -> list[int]:
    """Token ids of a plain prompt; ids are checked against the vocabulary."""
    if isinstance(prompt, str):
        return await entry.pipeline.encode(prompt, max_tokens=entry.facts.max_model_len, param=param)
    check_token_ids(prompt, entry.facts, param)
    return prompt


def response_id(prefix: str) -> str:
    """A new id of a response; the worker's requests are named after it."""
    return f"{prefix}-{uuid.uuid4().hex}"


def submit_all(
    request: web.Request,
    identifier: str,
    common: Common,
    entry: ModelEntryLike,
    prompts: Sequence[tuple[list[int], int]],
) -> FanIn:
    """One generation for each (prompt ids, max_tokens); nothing is submitted before the context is entered."""
    vocab_size = entry.facts.vocab_size
    requests: list[GenerationRequest] = [
        common.generation_request(f"{identifier}-{index}", ids, max_tokens, vocab_size)
        for index, (ids, max_tokens) in enumerate(prompts)
    ]
    log.debug("submit", response_id=identifier, prompts=len(requests), n=common.n)
    return FanIn(request.app[GENERATOR], requests, entry.facts.eos_token_ids)


def now() -> int:
    """Unix time for `created`."""
    return int(time.time())
