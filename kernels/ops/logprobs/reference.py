"""Log-probabilities of chosen and likeliest tokens in plain torch, on any device."""

from __future__ import annotations

import torch

from kernels.ops.logprobs.tensors import LOWEST_LOGPROB, LogprobTensors


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-softmax in float32 of the given and of the likeliest tokens.

    Args:
        logits: [L, vocab] float32, raw.
        token_ids: [L] int64; ids below 0 (a row that failed) are taken as 0.
        num_top: how many likeliest tokens to report; no more than the vocabulary has are.

    Returns:
        Log-probabilities between LOWEST_LOGPROB and 0, all of them LOWEST_LOGPROB where the row holds NaN or +inf, or
        nothing but -inf; the ids of such a row mean nothing, but lie in the vocabulary.
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
    """[L, 1] logarithms of the sums of exp, the same for a row alone and among others.

    The sum of a single row torch cuts into a piece for each thread, so it never gets one alone.
    """
    rows = logits.shape[0]
    return torch.logsumexp(logits.expand(2, -1) if rows == 1 else logits, dim=-1, keepdim=True)[:rows]


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[L, count] ids in order of logit downwards and id upwards; topk alone picks any of equal ones."""
    if count == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    top = torch.topk(logits, count, dim=-1)
    last = top.values[:, -1:]
    torn = ((logits == last).sum(dim=-1) > (top.values == last).sum(dim=-1)).nonzero().squeeze(1)
    ids = top.indices
    if len(torn):  # rows with more equals than there was room for
        ids[torn] = torch.sort(logits[torn], dim=-1, descending=True, stable=True).indices[:, :count]
    ids = ids.sort(dim=-1).values
    order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB, max=0.0)
