"""Which rows of a step are kept, on the CPU: a few calls of numpy for a step of any size."""

from __future__ import annotations

import numpy as np
import torch

from kernels.ops.speculative.inputs import Verified


def verify(token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
    """See the reference."""
    ids, bounds = token_ids.numpy(), cu_rows.numpy()
    kept = np.zeros(len(ids), np.bool_)
    num_rows = int(bounds[-1])
    ends = (ids[:num_rows] != drafts.numpy()[:num_rows]) | (ids[:num_rows] < 0)
    before = np.zeros(num_rows + 1, np.int32)  # rows before this one, of all requests, that end what is kept
    np.cumsum(ends, out=before[1:])
    first = np.repeat(before[bounds[:-1]], np.diff(bounds))
    kept[:num_rows] = before[:-1] == first
    accepted = np.zeros(num_rows + 1, np.int32)
    np.cumsum(before[1:] == first, out=accepted[1:])
    return Verified(torch.from_numpy(kept), torch.from_numpy(accepted[bounds[1:]] - accepted[bounds[:-1]]))
