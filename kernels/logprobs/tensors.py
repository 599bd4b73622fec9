"""What the log-probabilities op gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say, and for the log-probabilities of a row that has none."""
MAX_TOP = 128
"""Most tokens that can be reported of a row."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For L tokens, on the device.

    Attributes:
        token_ids: [L] int64.
        logprobs: [L] float32.
        ranks: [L] int64, 1 for the likeliest.
        top_ids, top_logprobs: [L, n] int64 and float32, best first; among equals the lowest id first.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
