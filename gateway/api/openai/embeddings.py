"""POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from gateway.api.common.accounting import Accounting, accounting
from gateway.api.common.fields import parse_fields
from gateway.api.common.generation_params import check_request_fields
from gateway.api.common.submission import find_model
from gateway.api.openai.embedding_batch import embed
from gateway.api.openai.embedding_fields import EmbeddingFields, vector_params
from gateway.api.openai.embedding_inputs import embedding_inputs
from gateway.api.openai.embedding_shapes import embedding_response, shaped_vector
from gateway.flow.events import GenerationRequest
from gateway.http.app_keys import DRAIN, GATEWAY_INDEX, GENERATOR, IDENTITY, REQUEST_ID, SALTS, log
from gateway.http.body import read_json
from gateway.http.errors import json_response
from gateway.stores.ids import new_id
from shared.messages import Pooling
from shared.sampling_params import SamplingParams


async def embeddings(request: web.Request) -> web.StreamResponse:
    """The vectors of one or several texts, or of token ids."""
    fields = parse_fields(await read_json(request), EmbeddingFields)
    check_request_fields(fields)
    accounts = accounting(fields)
    entry = find_model(request, fields.model)
    facts = entry.facts
    params = vector_params(fields, facts)
    inputs = await embedding_inputs(fields, entry)
    identifier = new_id("embd-", request.app[GATEWAY_INDEX])
    requests = _requests(request, identifier, fields, accounts, inputs, params.pooling)
    log.debug("submit", response_id=identifier, prompts=len(requests), n=1)
    # The response has no id, so the request is aborted by its own.
    with request.app[DRAIN].named((request[REQUEST_ID],), request[IDENTITY].key_hash):
        vectors = await embed(
            request.app[GENERATOR],
            requests,
            facts,
            partial(shaped_vector, params=params, hidden_size=facts.hidden_size),
        )
    return json_response(embedding_response(fields.model, vectors, sum(map(len, inputs)), accounts))


def _requests(
    request: web.Request,
    identifier: str,
    fields: EmbeddingFields,
    accounts: Accounting,
    inputs: Sequence[list[int]],
    pooling: Pooling,
) -> list[GenerationRequest]:
    identity = request[IDENTITY]
    salt = request.app[SALTS].derive(identity.key_hash, fields.cache_salt)
    return [
        GenerationRequest(
            request_id=f"{identifier}-{index}",
            model=fields.model,
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=1),
            salt=salt,
            tenant=identity.tenant,
            priority=accounts.priority,
            affinity=accounts.affinity,
            speculative=False,
            pooling=pooling,
        )
        for index, ids in enumerate(inputs)
    ]
