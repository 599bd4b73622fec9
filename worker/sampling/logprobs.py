"""Log-probabilities for reports: from the raw logits, before penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For L tokens, on the device.

    Attributes:
        token_ids: [L] int64.
        logprobs: [L] float32.
        ranks: [L] int64, 1 for the likeliest.
        top_ids, top_logprobs: [L, n] int64 and float32, best first.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-softmax in float32 of the given and of the likeliest tokens.

    Args:
        logits: [L, vocab] float32, raw.
        token_ids: [L] int64; ids below 0 (a row that failed) are taken as 0.
        num_top: how many likeliest tokens to report.
    """
    ids = token_ids.clamp(min=0).unsqueeze(1)
    chosen = logits.gather(1, ids)
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    top = torch.topk(logits, min(num_top, logits.shape[1]), dim=-1)
    return LogprobTensors(
        token_ids=ids.squeeze(1),
        logprobs=_finite(chosen - normalizer).squeeze(1),
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_ids=top.indices,
        top_logprobs=_finite(top.values - normalizer),
    )


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB, max=0.0)


def to_entries(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """On the host, each with as many alternatives as it asked for; equally likely ones in order of their ids."""
    entries = []
    columns = (tensors.token_ids, tensors.logprobs, tensors.ranks, tensors.top_ids, tensors.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), num_top)
    for token_id, logprob, rank, top_ids, top_logprobs, count in rows:
        best = sorted(zip(top_ids, top_logprobs), key=lambda pair: (-pair[1], pair[0]))[:count]
        ids = [pair[0] for pair in best]
        entries.append(TokenLogprobs(token_id, logprob, rank, ids, [pair[1] for pair in best]))
    return entries
