"""Detection of texts that repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.sampling_params import RepetitionDetection


class RepetitionWatch:
    """Detector for one text. Each token costs a few operations over an array of max_pattern_size.

    For each distance d it counts how many consecutive last tokens equal the token d before them. d * (n - 1) of them
    mean that a pattern of d tokens occurs n times in a row.

    Args:
        rule: Parameters of the detection.
        emitted: Tokens generated already.
    """

    def __init__(self, rule: RepetitionDetection, emitted: Sequence[int] = ()) -> None:
        size = rule.max_pattern_size
        self._first = rule.min_pattern_size - 1
        distances = np.arange(1, size + 1)
        self._needed = distances[self._first :] * (rule.min_count - 1)
        self._runs = np.zeros(size, dtype=np.int64)
        # The latest token comes first: `at` moves down, and the rest of the window is copied to the end again.
        self._recent = np.full(3 * size, -1, dtype=np.int64)
        self._at = 2 * size
        self._size = size
        for token_id in emitted:
            self.append(token_id)

    def append(self, token_id: int) -> bool:
        """Add the next token; return True if the text now ends with repetitions."""
        size, at = self._size, self._at
        self._runs += 1
        self._runs *= self._recent[at : at + size] == token_id
        if at == 0:
            self._recent[2 * size :] = self._recent[:size]
            at = 2 * size
        self._at = at - 1
        self._recent[at - 1] = token_id
        return bool((self._runs[self._first :] >= self._needed).any())
