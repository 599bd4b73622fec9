"""The embeddings that fakes give, and how a test reads one of a response."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

HIDDEN_SIZE = 8


def vector_of(token_ids: Sequence[int], pooling: str | None = "last", hidden_size: int = HIDDEN_SIZE) -> bytes:
    """As a worker would send it, not normalized: a function of the ids and of their order, other for each pooling."""
    places = np.arange(1, hidden_size + 1)
    hidden = np.sin(np.outer(np.arange(1, len(token_ids) + 1) + np.asarray([*token_ids]), places))
    pooled = hidden.mean(axis=0) if pooling == "mean" else hidden[-1] + len(token_ids)
    return (3.0 * pooled).astype("<f4").tobytes()


def unit_vector(token_ids: Sequence[int], pooling: str = "last", dimensions: int = HIDDEN_SIZE) -> np.ndarray:
    """The same as a client gets it."""
    values = np.frombuffer(vector_of(token_ids, pooling), "<f4")[:dimensions].astype(np.float64)
    return values / np.linalg.norm(values)


def decoded(embedding: str) -> np.ndarray:
    """The values of a vector in base64."""
    return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
