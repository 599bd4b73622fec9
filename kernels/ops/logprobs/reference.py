"""Log-probabilities of chosen and likeliest tokens in plain PyTorch, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOWEST_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON cannot represent, and for the values of rows that are not usable."""
MAX_TOP = 128
"""Largest number of likeliest tokens per row."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of L tokens, on the device.

    Attributes:
        token_ids: [L] int64.
        logprobs: [L] float32.
        ranks: [L] int64, 1 for the likeliest.
        top_ids: [L, n] int64, best first; among equal logits the lowest id first.
        top_logprobs: [L, n] float32.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def empty_logprobs(token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Return results for [L] int64 ids, on their device, with uninitialized other fields."""
    rows, device = len(token_ids), token_ids.device
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=torch.empty(rows, device=device),
        ranks=torch.empty(rows, dtype=torch.int64, device=device),
        top_ids=torch.empty((rows, num_top), dtype=torch.int64, device=device),
        top_logprobs=torch.empty((rows, num_top), device=device),
    )


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Compute the float32 log-softmax of the given and of the likeliest tokens.

    Args:
        logits: [L, vocab] float32, raw.
        token_ids: [L] int64; negative ids, of failed rows, count as 0.
        num_top: Number of likeliest tokens, limited to the size of the vocabulary.

    Returns:
        Log-probabilities between LOWEST_LOGPROB and 0. All values of a row are LOWEST_LOGPROB if it has NaN or
            +inf or is
        all -inf; its ids are then arbitrary ids of the vocabulary.
    """
    ids = token_ids.long().clamp(min=0).unsqueeze(1)
    chosen = logits.gather(1, ids)
    normalizer = _normalizer(logits)
    top_ids = _likeliest(logits, min(num_top, logits.shape[1]))
    return LogprobTensors(
        token_ids=ids.squeeze(1),
        logprobs=_finite(chosen - normalizer).squeeze(1),
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=_finite(logits.gather(1, top_ids) - normalizer),
    )


def _normalizer(logits: torch.Tensor) -> torch.Tensor:
    """Return [L, 1] logarithms of the sums of exp, equal for a row alone and among others.

    PyTorch splits the sum of a single row among threads, so a single row is passed twice.
    """
    rows = logits.shape[0]
    return torch.logsumexp(logits.expand(2, -1) if rows == 1 else logits, dim=-1, keepdim=True)[:rows]


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [L, count] ids sorted by descending logit and ascending id; topk alone breaks ties arbitrarily."""
    if count == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    top = torch.topk(logits, count, dim=-1)
    last = top.values[:, -1:]
    torn = ((logits == last).sum(dim=-1) > (top.values == last).sum(dim=-1)).nonzero().squeeze(1)
    ids = top.indices
    if len(torn):  # rows with more equal logits than fit
        ids[torn] = torch.sort(logits[torn], dim=-1, descending=True, stable=True).indices[:, :count]
    ids = ids.sort(dim=-1).values
    order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB, max=0.0)
