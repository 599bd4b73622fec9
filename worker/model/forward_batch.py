"""Tensors of one forward pass, passed explicitly to every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.attention.cascade import CascadeWork


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one step: T tokens of R requests. The tokens of a request are adjacent and in order.

    Attributes:
        input_ids: [T] int32.
        positions: [T] int32, absolute positions.
        cu_seqlens_q: [R + 1] int32, prefix sums of the tokens per request.
        seq_lens: [R] int32, context length of each request including this step's tokens.
        slot_mapping: Per KV group, [T] int64: page * page_size + slot for each token.
        block_tables: Per KV group, [R, max_pages] int32; entries after a request's pages are 0.
        logits_indices: [S] int64, tokens whose logits are computed.
        max_seqlen_q: Largest number of tokens of a request, on the host.
        max_seqlen_k: Largest context length, on the host.
        cascade: Prefixes that requests of a decode step share, in KV group 0; None if each reads its own.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]
    logits_indices: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cascade: CascadeWork | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.seq_lens.shape[0]
