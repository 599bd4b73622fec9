"""A linear layer in plain torch, in float64."""

from __future__ import annotations

import torch


def linear_dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute [T, K] @ [N, K].T + [N] -> [T, N] of x's dtype."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)
