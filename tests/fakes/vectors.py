"""Embeddings of the fakes, and decoding of embeddings in responses."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

HIDDEN_SIZE = 8


def vector_of(token_ids: Sequence[int], pooling: str | None = "last", hidden_size: int = HIDDEN_SIZE) -> bytes:
    """Return a worker's vector, not normalized: a function of the ids, their order and the pooling."""
    places = np.arange(1, hidden_size + 1)
    hidden = np.sin(np.outer(np.arange(1, len(token_ids) + 1) + np.asarray([*token_ids]), places))
    pooled = hidden.mean(axis=0) if pooling == "mean" else hidden[-1] + len(token_ids)
    return (3.0 * pooled).astype("<f4").tobytes()


def unit_vector(token_ids: Sequence[int], pooling: str = "last", dimensions: int = HIDDEN_SIZE) -> np.ndarray:
    """Return the same vector as a client receives it."""
    values = np.frombuffer(vector_of(token_ids, pooling), "<f4")[:dimensions].astype(np.float64)
    return values / np.linalg.norm(values)


def decoded(embedding: str) -> np.ndarray:
    """Return the values of a base64 vector."""
    return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
