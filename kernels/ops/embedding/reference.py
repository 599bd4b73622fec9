"""Token embedding lookup in plain torch."""

from __future__ import annotations

import torch


def embed(token_ids: torch.Tensor, weight: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of the table, scaled.

    Args:
        token_ids: [T] int32; an id outside the table gives a row of zeros, because another rank holds its row.
        weight: [rows, hidden], any float dtype.
        scale: Factor, applied in float32; None for 1.
        dtype: Dtype of the result.

    Returns:
        [T, hidden] of `dtype`.
    """
    if not weight.shape[0]:
        return torch.zeros((token_ids.shape[0], weight.shape[1]), dtype=dtype, device=weight.device)
    held = (token_ids >= 0) & (token_ids < weight.shape[0])
    rows = weight.index_select(0, torch.where(held, token_ids, 0)).float() * held.unsqueeze(1)
    return (rows if scale is None else rows * scale).to(dtype)
