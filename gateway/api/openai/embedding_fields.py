"""The fields of /v1/embeddings, and what they ask of its vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from gateway.api.common.fields import RequestFields
from gateway.api.common.ranges import check_range
from shared.errors import InvalidRequestError
from shared.messages import Pooling, WorkerFacts

ENCODINGS = ("float", "base64")
_POOLINGS: dict[str, Pooling] = {name: name for name in get_args(Pooling)}


class EmbeddingFields(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """/v1/embeddings. The input is checked by gateway.api.openai.embedding_inputs."""

    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None
    # What vLLM's users send.
    pooling: str | None = None
    normalize: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorParams:
    """Attributes:
    pooling: of the hidden states.
    dimensions: how many of a vector's values are kept, from the first.
    normalize: whether what is kept is divided by its length.
    as_base64: float32 in little endian as base64, instead of a list of numbers.
    """

    pooling: Pooling
    dimensions: int
    normalize: bool
    as_base64: bool


def vector_params(fields: EmbeddingFields, facts: WorkerFacts) -> VectorParams:
    """Checks the fields. Raises InvalidRequestError naming the one at fault."""
    if not facts.hidden_size:
        raise InvalidRequestError("The model's worker does not make embeddings.", param="model")
    if fields.encoding_format not in (None, *ENCODINGS):
        raise InvalidRequestError(f"encoding_format must be {' or '.join(ENCODINGS)}.", param="encoding_format")
    pooling = _POOLINGS.get(facts.pooling if fields.pooling is None else fields.pooling)
    if pooling is None:
        raise InvalidRequestError(f"pooling must be {' or '.join(_POOLINGS)}.", param="pooling")
    dimensions = facts.hidden_size
    if fields.dimensions is not None:
        dimensions = check_range("dimensions", fields.dimensions, 1, facts.hidden_size)
    return VectorParams(
        pooling=pooling,
        dimensions=dimensions,
        normalize=fields.normalize is not False,
        as_base64=fields.encoding_format == "base64",
    )
