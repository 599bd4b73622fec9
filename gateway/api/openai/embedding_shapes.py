"""/v1/embeddings: vectors as a worker sends them to OpenAI's shape."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from gateway.api.common.accounting import Accounting
from gateway.api.openai.embedding_fields import VectorParams
from shared.errors import InternalError

Shaped = str | orjson.Fragment
"""A vector as it stands in the response."""


def shaped_vector(embedding: bytes, params: VectorParams, hidden_size: int) -> Shaped:
    """What is shown of an embedding: cut, then normalized (L2), then encoded.

    Numbers are written as the shortest that name the same float32, as base64 holds it.

    Args:
        embedding: `hidden_size` values, float32 in little endian. Raises InternalError for anything else, and for
            values that are not finite.
    """
    if len(embedding) != 4 * hidden_size:
        raise InternalError("The worker sent an embedding of another size.")
    # In float64 no square overflows.
    values = np.frombuffer(embedding, "<f4")[: params.dimensions].astype(np.float64)
    length = math.sqrt(np.dot(values, values))
    if not math.isfinite(length):
        raise InternalError("The model's embedding has values that are not finite.")
    if params.normalize and length > 0.0:
        values /= length
    if params.as_base64:
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
    return orjson.Fragment(orjson.dumps(values.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY))


def embedding_response(
    model: str, vectors: Sequence[Shaped], num_prompt_tokens: int, accounting: Accounting
) -> dict[str, Any]:
    """The whole response. As OpenAI's it has neither an id nor a time."""
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)],
        "model": model,
        "usage": {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens},
        **({} if accounting.tier is None else {"service_tier": accounting.tier}),
        **({} if accounting.metadata is None else {"metadata": accounting.metadata}),
    }
