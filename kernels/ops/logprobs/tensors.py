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


def empty_logprobs(token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """For [L] int64 ids, on their device, with nothing in the other fields yet."""
    rows, device = len(token_ids), token_ids.device
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=torch.empty(rows, device=device),
        ranks=torch.empty(rows, dtype=torch.int64, device=device),
        top_ids=torch.empty((rows, num_top), dtype=torch.int64, device=device),
        top_logprobs=torch.empty((rows, num_top), device=device),
    )
