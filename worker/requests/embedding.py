"""Embedding of one prompt, pooled from the model's hidden states while the prompt is computed."""

from __future__ import annotations

import numpy as np

from shared.messages import Pooling

_Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


class Embedding:
    """Pooling of the hidden states of one request, from the first chunk of its prompt to the last.

    The executor sums the hidden states of a chunk, and this class sums the chunks in float64, so that the result does
    not depend on the chunks.

    Args:
        pooling: `last`: the state of the last token; `mean`: the mean over all tokens.
    """

    __slots__ = ("_count", "_pooling", "_sum")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: _Vector | None = None
        self._count = 0

    @property
    def needs_all(self) -> bool:
        """True if every token must be computed, because hidden states of cached pages are not available."""
        return self._pooling == "mean"

    def num_pooled(self, count: int, *, ends: bool) -> int:
        """Return how many of the last tokens of a chunk are pooled. `ends` marks the last chunk of the prompt."""
        return count if self.needs_all else int(ends)

    def add(self, total: bytes, count: int) -> bool:
        """Add the sum of `count` hidden states, [hidden] float64 in little-endian order.

        Return False if it is not finite.
        """
        values = np.frombuffer(total, dtype="<f8")
        self._sum = values if self._sum is None else self._sum + values
        self._count += count
        return bool(np.isfinite(values).all())

    def vector(self) -> bytes:
        """Return the pooled states, [hidden] float32 in little-endian order.

        Raises RuntimeError if nothing was added.
        """
        if self._sum is None:
            raise RuntimeError("nothing was pooled")
        return (self._sum / self._count).astype("<f4").tobytes()

    def clear(self) -> None:
        """Reset, because the prompt is computed again from its first token."""
        self._sum, self._count = None, 0
