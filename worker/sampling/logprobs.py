"""Log-probabilities for reports: from the raw logits, before penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.ops.logprobs.reference import compute_logprobs
from kernels.ops.logprobs.tensors import LOWEST_LOGPROB, LogprobTensors
from shared.messages import TokenLogprobs

__all__ = ["LOWEST_LOGPROB", "LogprobTensors", "compute_logprobs", "to_entries"]


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
