"""POST /v1/embeddings: fields, inputs, vectors and the route."""

from __future__ import annotations

import base64
import math
from functools import partial
from typing import Any, get_args

import numpy as np
import orjson
from aiohttp import web

from gateway.api.common.fields import RequestFields, check_choice, check_range, invalid, parse_fields
from gateway.api.common.options import accounting, check_request_fields, max_text_tokens
from gateway.api.common.prepare import find_model
from gateway.api.common.prompts import (
    Prompt,
    context_limit,
    cut,
    encode_prompt,
    limit_name,
    split_prompts,
)
from gateway.api.openai.embedding_batch import embed
from gateway.cluster.registry import ModelEntry
from gateway.flow.events import GenerationRequest
from gateway.http.app_keys import IDENTITY, REQUEST_ID, SERVICES, log
from gateway.http.body import read_json
from gateway.http.errors import json_response
from gateway.stores.ids import new_id
from shared.errors import ContextLengthError, InternalError, InvalidRequestError
from shared.messages import Pooling, WorkerFacts
from shared.sampling_params import SamplingParams

ENCODINGS = ("float", "base64")
MAX_INPUTS = 2048
"""OpenAI's limit."""
_POOLINGS: dict[str, Pooling] = {name: name for name in get_args(Pooling)}


class EmbeddingFields(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/embeddings."""

    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None
    # Parameters of vLLM.
    pooling: str | None = None
    normalize: bool | None = None


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Return the vectors of one or several texts or lists of token ids."""
    fields = parse_fields(await read_json(request), EmbeddingFields)
    check_request_fields(fields)
    priority, tier = accounting(fields)
    entry, identity = find_model(request, fields.model), request[IDENTITY]
    pooling = pooling_of(fields, entry.facts)
    inputs = await embedding_inputs(fields, entry)
    identifier = new_id("embd-", request.app[SERVICES].gateway_index)
    salt = request.app[SERVICES].salts.derive(identity.key_hash, fields.cache_salt)
    requests = [
        GenerationRequest(
            request_id=f"{identifier}-{index}",
            model=fields.model,
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=1),
            salt=salt,
            tenant=identity.tenant,
            priority=priority,
            affinity=fields.prompt_cache_key or "",
            speculative=False,
            pooling=pooling,
        )
        for index, ids in enumerate(inputs)
    ]
    log.debug("submit", response_id=identifier, prompts=len(requests), n=1)
    shape = partial(shaped_vector, fields=fields, hidden_size=entry.facts.hidden_size)
    # The response has no id: the request is aborted by the id of the HTTP request.
    with request.app[SERVICES].drain.named((request[REQUEST_ID],), identity.key_hash):
        vectors = await embed(request.app[SERVICES].generator, requests, entry.facts, shape)
    num_tokens = sum(map(len, inputs))
    # Like OpenAI's response it has neither an id nor a time.
    response: dict[str, Any] = {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)],
        "model": fields.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    if tier is not None:
        response["service_tier"] = tier
    if fields.metadata:
        response["metadata"] = fields.metadata
    return json_response(response)


def pooling_of(fields: EmbeddingFields, facts: WorkerFacts) -> Pooling:
    """Return the pooling of the hidden states, after checking the fields on vectors.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    if not facts.hidden_size:
        raise InvalidRequestError("This model does not support embeddings.", param="model")
    check_choice("encoding_format", fields.encoding_format, (None, *ENCODINGS))
    if fields.dimensions is not None:
        check_range("dimensions", fields.dimensions, 1, facts.hidden_size)
    pooling = facts.pooling if fields.pooling is None else fields.pooling
    check_choice("pooling", pooling, _POOLINGS)
    return _POOLINGS[pooling]


async def embedding_inputs(fields: EmbeddingFields, entry: ModelEntry) -> list[list[int]]:
    """Return the token ids of each input; texts get the model's special tokens.

    Raises:
        InvalidRequestError: An input is empty or has an id outside the vocabulary.
        ContextLengthError: An input, or `truncate_prompt_tokens`, exceeds the context.
    """
    inputs = split_prompts(fields.input, "input", MAX_INPUTS)
    limit, name, keep = context_limit(entry.facts), limit_name(entry.facts), fields.truncate_prompt_tokens
    if keep is not None and keep > limit:
        message = f"truncate_prompt_tokens is {keep}; the model's {name} is {limit} tokens."
        raise ContextLengthError(message, param="truncate_prompt_tokens")
    if keep == -1:
        keep = limit
    result = []
    for index, value in enumerate(inputs):
        param = f"input[{index}]" if len(inputs) > 1 else "input"
        ids = await _token_ids(value, fields, entry, param, keep)
        if not ids:
            raise invalid(param, "has no tokens.")
        if len(ids) > limit:
            # LangChain recognizes the error by its first words.
            message = f"The prompt is too long: {param} has {len(ids)} tokens; the model's {name} is {limit} tokens."
            raise ContextLengthError(message, param=param)
        result.append(ids)
    return result


async def _token_ids(
    value: Prompt, fields: EmbeddingFields, entry: ModelEntry, param: str, keep: int | None
) -> list[int]:
    special, side = fields.add_special_tokens is not False, fields.truncation_side
    max_tokens = max_text_tokens(fields, entry.facts)
    ids = await encode_prompt(value, entry, param, add_special_tokens=special, max_tokens=max_tokens)
    if keep is None or len(ids) <= keep:
        return ids
    if isinstance(value, str) and special:
        plain = await entry.pipeline.encode(value, False, max_tokens=max_tokens, param=param)
        return _cut_between(ids, plain, keep, side)
    return cut(ids, keep, side)


def _cut_between(ids: list[int], plain: list[int], keep: int, side: str | None) -> list[int]:
    """Return `keep` of the ids with all special tokens: a model made for embeddings is read at its end token.

    Args:
        ids: The text with special tokens around it.
        plain: The text without them.
        keep: Number of ids to keep.
        side: End of the text that is cut; None is the left one.
    """
    num_special = len(ids) - len(plain)
    for begin in range(num_special + 1):
        end = begin + len(plain)
        if num_special < keep and ids[begin:end] == plain:
            return ids[:begin] + cut(plain, keep - num_special, side) + ids[end:]
    return cut(ids, keep, side)


def shaped_vector(embedding: bytes, fields: EmbeddingFields, hidden_size: int) -> str | orjson.Fragment:
    """Return an embedding as the response shows it: cut, then normalized (L2), then encoded.

    Numbers are written as the shortest that round to the same float32.

    Args:
        embedding: `hidden_size` values, little-endian float32.
        fields: The request.
        hidden_size: The model's hidden size.

    Raises:
        InternalError: The embedding has another size, or values that are not finite.
    """
    if len(embedding) != 4 * hidden_size:
        raise InternalError("The worker sent an embedding of another size.")
    # No square of a float32 overflows float64.
    values = np.frombuffer(embedding, "<f4")[: fields.dimensions].astype(np.float64)
    length = math.sqrt(np.dot(values, values))
    if not math.isfinite(length):
        raise InternalError("The model's embedding has values that are not finite.")
    if fields.normalize is not False and length > 0.0:
        values /= length
    if fields.encoding_format == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
    return orjson.Fragment(orjson.dumps(values.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY))
