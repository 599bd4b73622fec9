"""The vector of one prompt, made of the model's hidden states while the prompt is read."""

from __future__ import annotations

import numpy as np

from shared.messages import Pooling

_Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


class Embedding:
    """What pools the hidden states of one request, from the first chunk of its prompt to the last.

    The executor sums up the hidden states of a chunk, here the sums of all chunks are: in float64, so that it shows in
    no vector how the prompt was cut.

    Args:
        pooling: `last`: the state of the last token; `mean`: the mean of all.
    """

    __slots__ = ("_count", "_pooling", "_sum")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: _Vector | None = None
        self._count = 0

    @property
    def needs_all(self) -> bool:
        """Whether every token of the prompt has to be computed: of cached pages nobody has the hidden states."""
        return self._pooling == "mean"

    def num_pooled(self, count: int, *, ends: bool) -> int:
        """Of a chunk of `count` tokens, how many of the last ones are pooled. ends: it is the prompt's last chunk."""
        return count if self.needs_all else int(ends)

    def add(self, total: bytes, count: int) -> bool:
        """Takes the sum of `count` hidden states, [hidden] float64 in little endian; False where it is not finite."""
        values = np.frombuffer(total, dtype="<f8")
        self._sum = values if self._sum is None else self._sum + values
        self._count += count
        return bool(np.isfinite(values).all())

    def vector(self) -> bytes:
        """The pooled states, [hidden] float32 in little endian. Raises RuntimeError where nothing was added."""
        if self._sum is None:
            raise RuntimeError("nothing was pooled")
        return (self._sum / self._count).astype("<f4").tobytes()

    def clear(self) -> None:
        """The prompt is read again from its first token."""
        self._sum, self._count = None, 0
