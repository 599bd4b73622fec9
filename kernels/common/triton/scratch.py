"""Memory that kernels use to pass data within a step; the steps of one stream share it."""

from __future__ import annotations

import torch


class Scratch:
    """32-bit numbers, as many as the largest step so far needed."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.empty(0, dtype=torch.int32, device=device)
        self._replaced: list[torch.Tensor] = []  # captured graphs continue to use it

    def of(self, size: int) -> torch.Tensor:
        """Return at least `size` numbers of undefined value."""
        if self._words.numel() < size:
            self._replaced.append(self._words)
            self._words = torch.empty(size, dtype=torch.int32, device=self._words.device)
        return self._words
