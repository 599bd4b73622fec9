"""What the draft model drew its tokens from, kept until they are verified by rejection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Distributions:
    """Per row and position the distribution of the token drafted there last, [vocab] float32 on the device.

    A row has some only between a step of the draft model and the target's next with this row: each takes as much memory
    as a row of logits, and what is drafted next comes from another distribution.
    """

    def __init__(self) -> None:
        self._of_row: dict[int, dict[int, torch.Tensor]] = {}

    def forget(self, rows: Iterable[int]) -> None:
        """What was drafted for these rows is verified, or never will be."""
        for row in rows:
            self._of_row.pop(row, None)

    def put(self, rows: Sequence[int], positions: Sequence[int], probabilities: torch.Tensor) -> None:
        """probabilities: [n, vocab], of the token at a position of each row."""
        for row, position, one in zip(rows, positions, probabilities, strict=True):
            self._of_row.setdefault(row, {})[position] = one

    def find(self, row: int, position: int) -> torch.Tensor | None:
        """[vocab], None where nothing was drafted there."""
        return self._of_row.get(row, {}).get(position)
